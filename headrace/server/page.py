"""The page at `/`: its files, a fixed list, with the headers that keep a browser to them."""

from functools import cache
from hashlib import blake2b
from pathlib import Path

from headrace.server.asgi import Call
from headrace.server.served_model import ServedModel

FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_NAMES = (
    *("style.css", "icon.svg", "main.js", "address.js", "dom.js", "format.js", "theme.js"),
    *("chat.js", "settings.js", "event_stream.js", "markdown.js"),
    *("dashboard.js", "plots.js", "block_map.js", "roofline.js"),
    *("vendor/uPlot.iife.min.js", "vendor/uPlot.min.css"),
)
FILES = {"/": "index.html"} | {f"/page/{name}": name for name in _NAMES}
"""Files in the folder, by the path that a browser asks for. No other is served, whatever a path
looks like.
"""
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def file(served: ServedModel, call: Call) -> None:
    """A file of the page in the browser."""
    name = FILES[call.scope["path"]]
    body, tag = _read(name)
    headers = _HEADERS | {"etag": tag}
    if call.header("if-none-match") == tag:
        await call.respond_unchanged(headers)
    else:
        await call.respond_bytes(body, _TYPES[Path(name).suffix], headers=headers)


@cache
def _read(name: str) -> tuple[bytes, str]:
    """What a file holds, and its entity tag."""
    body = (FOLDER / name).read_bytes()
    return body, f'"{blake2b(body, digest_size=12).hexdigest()}"'
