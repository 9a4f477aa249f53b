"""Reads bodies with a `Content-Encoding`, up to a number of bytes."""

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from headrace.server.errors import ApiError, invalid

ENCODINGS = ("gzip", "deflate", "zstd")
_MAX_ENCODINGS = 2
_GZIP = 16 + zlib.MAX_WBITS
_ZSTD_WINDOW = 24
"""Max binary logarithm of the bytes that a frame may refer back to: 16 MB of memory."""


def read_encodings(header: str) -> list[str]:
    """Return the encodings of a body in the order of decoding. Raises ApiError for unknown ones."""
    names = [word.strip().lower().removeprefix("x-") for word in header.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    for name in names:
        if name not in _DECODERS:
            raise _unsupported(f"content-encoding {name[:64]!r} is not supported")
    if len(names) > _MAX_ENCODINGS:
        raise _unsupported(f"content-encoding names {len(names):,} encodings")
    return names[::-1]


def decode(body: bytes, encodings: list[str], max_bytes: int) -> bytes:
    """Decode a body. Raises ApiError if it is malformed, or longer than `max_bytes`."""
    for name in encodings:
        try:
            body = _DECODERS[name](body, max_bytes + 1)
        except (zlib.error, ValueError) as error:
            reason = str(error) or "it is cut"
            raise invalid(f"the body is not {name}: {reason}", code="invalid_encoding") from None
        if len(body) > max_bytes:
            raise ApiError(
                413,
                "request_too_large",
                f"the body is longer than {max_bytes:,} bytes when it is decompressed",
            )
    return body


def _unsupported(message: str) -> ApiError:
    error = ApiError(
        415,
        "unsupported_media_type",
        f"{message}; send {', '.join(ENCODINGS)}, or an uncompressed body",
    )
    error.headers["accept-encoding"] = ", ".join(ENCODINGS)
    return error


def _gzip(body: bytes, most: int) -> bytes:
    return _frames(body, most, lambda: zlib.decompressobj(_GZIP))


def _deflate(body: bytes, most: int) -> bytes:
    try:
        return _frames(body, most, zlib.decompressobj)
    except zlib.error:  # some clients leave out the header of zlib (RFC 9110, section 8.4.1.2)
        return _frames(body, most, lambda: zlib.decompressobj(-zlib.MAX_WBITS))


def _zstd(body: bytes, most: int) -> bytes:
    zstd = _zstd_module()
    options = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW}
    try:
        return _frames(body, most, lambda: zstd.ZstdDecompressor(options=options))
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from None


def _zstd_module() -> Any:
    """The module of Python 3.14, or its backport. Raises ApiError without either."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise _unsupported("content-encoding 'zstd' needs the package backports.zstd on the server")


def _frames(body: bytes, most: int, make: Callable[[], Any]) -> bytes:
    """Decompress frames up to `most` bytes. Raises ValueError if the last one is cut."""
    parts, size = [], 0
    while size < most:
        decompressor = make()
        part = decompressor.decompress(body, most - size)
        parts.append(part)
        size += len(part)
        body = decompressor.unused_data
        if size < most and not decompressor.eof:
            raise ValueError("it is cut")
        if not body:
            break
    return b"".join(parts)


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
}
