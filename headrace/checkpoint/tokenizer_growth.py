"""Bounds the growth of texts: thirty replacements of `a` by `aa` would need a terabyte."""

import base64
import json
import math
from typing import Any

import tokenizers

from headrace.errors import FormatError

_MAX_GROWTH = 256
_ADDED_ONCE = 64


def check_growth(backend: tokenizers.Tokenizer, where: str) -> None:
    """Raise FormatError if the tokenizer multiplies a text."""
    parts = [
        json.loads(part.__getstate__())
        for part in (backend.normalizer, backend.post_processor)
        if part is not None
    ]
    growth = math.prod(map(_growth, parts))
    if growth > _MAX_GROWTH:
        raise FormatError(
            f"{where}: the tokenizer makes texts up to {growth:,} times as long, more than the "
            f"limit of {_MAX_GROWTH}"
        )


def _growth(part: dict[str, Any]) -> int:
    match part:
        case {"type": "Sequence", "normalizers": parts} | {"type": "Sequence", "processors": parts}:
            return math.prod(map(_growth, parts))
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": content} if (
            pattern
        ):
            return max(1, -(-len(content) // len(pattern)))
        case {"type": "Replace", "content": content}:
            # An expression may match between any two characters.
            return 1 + len(content)
        case {"type": "Prepend", "prepend": text}:
            return 1 + len(text) // _ADDED_ONCE
        case {"type": "Precompiled", "precompiled_charsmap": charsmap}:
            # The size of a trie, the trie, and the replacements.
            raw = base64.b64decode(charsmap)
            replacements = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
            return 1 + max(map(len, replacements)) // _ADDED_ONCE
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": special}:
            texts = sum("Sequence" in piece for piece in pieces)
            ids = sum(
                len(special.get(piece["SpecialToken"]["id"], {}).get("ids", ()))
                for piece in pieces
                if "SpecialToken" in piece
            )
            return max(1, texts) + ids // _ADDED_ONCE
    return 1
