from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.tokenizer import Tokenizer
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
    """Token ids of a text in pieces. Raises RequestError as `text_pieces`."""
    text = read_text(file, "calibration")
    return text_pieces(
        checkpoint.load_tokenizer(),
        text,
        min(length, checkpoint.spec.max_context),
        tokens,
        f"calibration text {str(file)!r}",
    )


def text_pieces(
    tokenizer: Tokenizer, text: str, length: int, tokens: int, name: str
) -> list[list[int]]:
    """Token ids of a text in pieces of `length` tokens, up to `tokens` in all.

    Each piece begins with the tokens that the tokenizer adds before a text, usually BOS.
    Raises RequestError if `name`, the text, has less than two tokens in a piece, or if the
    added tokens leave no room.
    """
    prefix = tokenizer.prefix_ids
    if len(prefix) >= length:
        raise RequestError(
            f"length is {length:,}, and each piece begins with {len(prefix):,} tokens of the "
            f"tokenizer; use at least {len(prefix) + 1:,}"
        )
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    if not ids or len(prefix) + len(ids) < 2:
        count = f"{len(ids):,} token" + "s" * (len(ids) != 1)
        raise RequestError(f"{name} has {count}; use a longer one")
    return split_pieces(ids, length, tokens, prefix)


def split_pieces(
    ids: Sequence[int], length: int, tokens: int, prefix: Sequence[int] = ()
) -> list[list[int]]:
    """Cut `ids` into at least one piece; each begins with `prefix`, which counts as well."""
    step = length - len(prefix)
    count = max(1, min(tokens // length, len(ids) // step))
    return [[*prefix, *ids[i * step : (i + 1) * step]] for i in range(count)]


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
