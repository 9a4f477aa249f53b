// Where the server's routes are: beside the page, wherever a proxy may have put it. A password in the page's address is left out, since
// fetch() refuses one; the browser sends it by itself.

export const address = (route) => new URL(route, location.origin + location.pathname);
