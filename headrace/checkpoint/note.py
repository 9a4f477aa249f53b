"""What a model's file says of its own loss: a description, and a measured price."""

import json
from collections.abc import Mapping
from typing import Any

from headrace.model.fields import Fields

FOLDER_NOTE, FOLDER_PRICE = "headrace_note", "headrace_price"
"""Fields of `config.json`."""
GGUF_NOTE, GGUF_PRICE = "headrace.note", "headrace.price"
"""Keys of a GGUF file; the price is JSON."""
_MAX_LENGTH = 400


def note_of(fields: Fields, key: str) -> str:
    """The description; empty if there is none. The text is not trusted, so it is a short line."""
    text = fields.get(key)
    if not isinstance(text, str):
        return ""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_MAX_LENGTH])


def price_of(fields: Fields, key: str) -> Mapping[str, Any]:
    """The price as the file has it; empty if there is none."""
    value = fields.get(key)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, Mapping) else {}
