// Addresses of the server's routes, relative to the page, so that a proxy may serve the page at any path.
// A password in the page's address is left out: fetch() rejects it, and the browser sends it anyway.

export const address = (route) => new URL(route, location.origin + location.pathname);
