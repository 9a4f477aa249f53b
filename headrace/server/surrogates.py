"""Mends half surrogate pairs, which clients leave that cut text by UTF-16 units."""

import json
import re
from typing import Any

from headrace.messages import note_mended
from headrace.server.errors import invalid

_MENDED = ("messages", "input", "system", "instructions", "prompt", "documents", "content")
"""Fields with text that a client passes on. Other fields must be valid."""
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?"
    rb"|u[dD][c-fC-F][0-9a-fA-F]{2}|.)",
    re.DOTALL,
)
_HALF = re.compile("[\ud800-\udfff]")


def mend_surrogates(body: bytes) -> bytes | None:
    """Return a JSON body with U+FFFD for each half pair; None if it has none, or is no JSON.

    Raises ApiError, which names the field, if another field than those with passed-on text has one.
    """
    try:
        text = body.decode("utf-8", "surrogatepass")
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    halves = [name for name, value in fields.items() if _has_half(value)]
    if not halves:
        return None
    for name in halves:
        if name not in _MENDED:
            raise invalid(f"{name} is not valid Unicode: it has lone surrogates", name)
        note_mended(f"{name} has halves of surrogate pairs, which read as U+FFFD")
    # Halves that are encoded as bytes join to characters here.
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return _ESCAPE.sub(_mended, whole.encode())


def _mended(escape: re.Match[bytes]) -> bytes:
    is_half = escape[0][1:3].lower() == b"ud" and escape[0][3:4].lower() in b"89abcdef"
    return b"\\ufffd" if is_half and escape[1] is None else escape[0]


def _has_half(value: Any) -> bool:
    if isinstance(value, str):
        return _HALF.search(value) is not None
    if isinstance(value, dict):
        return any(_has_half(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(map(_has_half, value))
