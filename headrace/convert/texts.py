from pathlib import Path
from typing import Literal

from headrace.checkpoint.load import Checkpoint
from headrace.convert.quality import split_pieces
from headrace.errors import RequestError

_EVALUATION_SHARE = 4
"""Every fourth topic is for evaluation only."""

TextUse = Literal["calibration", "evaluation"]


def read_text(file: Path | None, use: TextUse) -> str:
    """Read a file, or Python's language reference. Raises RequestError."""
    if file is None:
        return _reference(use)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not a text in UTF-8"
        raise RequestError(f"{file}: {reason}") from None


def calibration_pieces(
    checkpoint: Checkpoint, file: Path | None, length: int, tokens: int
) -> list[list[int]]:
    """Token ids of a text in pieces. Raises RequestError if it has no tokens."""
    text = read_text(file, "calibration")
    ids = checkpoint.load_tokenizer().encode(text, add_special=False, parse_special=False)
    if not ids:
        raise RequestError(f"calibration text {str(file)!r} is empty; use a longer one")
    return split_pieces(ids, min(length, checkpoint.spec.max_context), tokens)


def _reference(use: TextUse) -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise RequestError(
            "this Python has no language reference; name a text with --text FILE"
        ) from None
    is_evaluation = use == "evaluation"
    chosen = [
        topics[name]
        for i, name in enumerate(sorted(topics))
        if (i % _EVALUATION_SHARE == 0) == is_evaluation
    ]
    return "\n\n".join(chosen)
