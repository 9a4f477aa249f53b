"""Probes of token counts."""

from collections.abc import Sequence
from typing import Any

from headrace.audit.bodies import Tokens
from headrace.audit.client import FailedError, NotOfferedError
from headrace.audit.compare import Finding, differs, equal, not_offered
from headrace.audit.context import SUBJECT, Context


async def counts(context: Context) -> Sequence[Finding]:
    """Compare the usage with the tokens of the answer, and with the tokenizer of the server."""
    return [_output_tokens(context), await _prompt_tokens(context)]


def _output_tokens(context: Context) -> Finding:
    usage, output = context.first.usage, context.first.output
    if usage is None:
        return not_offered("no usage")
    if usage.total_tokens != usage.prompt_tokens + usage.completion_tokens:
        return differs(
            f"total_tokens {usage.total_tokens} is not {usage.prompt_tokens} + "
            f"{usage.completion_tokens}"
        )
    if not context.has_scores:
        return not_offered("no log-probabilities to count")
    # The end token may be counted without being listed.
    spare = 1 if output.finish_reason == "stop" else 0
    if not len(output.tokens) <= usage.completion_tokens <= len(output.tokens) + spare:
        return differs(
            f"completion_tokens {usage.completion_tokens}, but {len(output.tokens)} tokens"
        )
    return equal(f"{usage.completion_tokens} tokens")


async def _prompt_tokens(context: Context) -> Finding:
    usage = context.first.usage
    if usage is None:
        return not_offered("no usage")
    if (count := await _tokenized(context)) is None:
        return not_offered("no route /tokenize for this prompt")
    if count != usage.prompt_tokens:
        return differs(f"prompt_tokens {usage.prompt_tokens}, but /tokenize gives {count}")
    return equal(f"{count} tokens")


async def _tokenized(context: Context) -> int | None:
    """Count the tokens of `SUBJECT` by the server's tokenizer."""
    forms: list[dict[str, Any]] = [{"model": context.model, **context.api.body(SUBJECT)}]
    if not context.api.is_chat:
        forms.append({"content": SUBJECT, "add_special": True})
    for form in forms:
        try:
            found = await context.client.post("/tokenize", form, Tokens)
        except (NotOfferedError, FailedError):
            continue
        if found.tokens:
            return len(found.tokens)
    return None
