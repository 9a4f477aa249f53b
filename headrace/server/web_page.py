"""The web page at `/`: fixed files under a strict content security policy."""

from functools import cache
from hashlib import blake2b
from pathlib import Path

from headrace.server.http_exchange import HttpExchange

FOLDER = Path(__file__).parent / "page"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_NAMES = (
    "style.css",
    "icon.svg",
    "main.js",
    "address.js",
    "dom.js",
    "format.js",
    "theme.js",
    "chat.js",
    "settings.js",
    "event_stream.js",
    "markdown.js",
    "dashboard.js",
    "bars.js",
    "plots.js",
    "block_map.js",
    "roofline.js",
    "vendor/uPlot.iife.min.js",
    "vendor/uPlot.min.css",
)
FILES = {"/": "index.html"} | {f"/page/{name}": name for name in _NAMES}
"""Names of files by URL path."""
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def page_file(http: HttpExchange, state: object) -> None:
    """File of the web page."""
    name = FILES[http.path]
    body, tag = _read(name)
    headers = _HEADERS | {"etag": tag}
    if http.header("if-none-match") == tag:
        await http.respond_empty(304, headers)
    else:
        await http.respond_bytes(body, _CONTENT_TYPES[Path(name).suffix], headers=headers)


@cache
def _read(name: str) -> tuple[bytes, str]:
    body = (FOLDER / name).read_bytes()
    return body, f'"{blake2b(body, digest_size=12).hexdigest()}"'
