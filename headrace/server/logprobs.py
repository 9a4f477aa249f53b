from collections.abc import Sequence
from typing import Any

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.outputs import Logprob, Logprobs

_MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


def chat_logprobs(entries: list[Logprobs], num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Log-probabilities of tokens and of the `num_top` likeliest tokens."""
    content = []
    for entry in entries:
        token_id, sampled = next(iter(entry.items()))
        top = sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]
        content.append(
            _chat_token(token_id, sampled, tokenizer)
            | {"top_logprobs": [_chat_token(other, score, tokenizer) for other, score in top]}
        )
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, score: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": score.decoded_token,
        "logprob": _json_number(score.logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def completion_logprobs(
    entries: Sequence[Logprobs | None],
    token_ids: list[int],
    num_top: int,
    offset: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """`offset` counts characters. The first token of a prompt has None."""
    result: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry:
            text = entry[token_id].decoded_token
            result["token_logprobs"].append(_json_number(entry[token_id].logprob))
            result["top_logprobs"].append(_top_logprobs(entry, num_top))
        else:
            text = tokenizer.token_bytes(token_id).decode(errors="replace")
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
        result["tokens"].append(text)
        result["text_offset"].append(offset)
        offset += len(text)
    return result


def _top_logprobs(entry: Logprobs, num_top: int) -> dict[str, float]:
    top = sorted(entry.values(), key=lambda score: score.rank)[: max(num_top, 1)]
    return {score.decoded_token: _json_number(score.logprob) for score in top}


def _json_number(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
