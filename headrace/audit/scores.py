"""Probes of log-probabilities: the top tokens of a position, and scoring against generation."""

from collections.abc import Sequence
from math import exp
from typing import Any

from headrace.audit.answers import NO_LOGPROB, Token, scored_tokens
from headrace.audit.bodies import Body
from headrace.audit.client import NotOfferedError
from headrace.audit.compare import Finding, differs, equal, not_offered, shown
from headrace.audit.context import APIS, GREEDY, SUBJECT, Context

_MAX_SUM = 1.001
"""Upper bound of a sum of probabilities; their float32 values may round up."""


async def top_tokens(context: Context) -> Sequence[Finding]:
    """Check sums, order and the drawn token of the top log-probabilities."""
    tokens = context.first.output.tokens
    if not any(token.top for token in tokens):
        return [not_offered("no top_logprobs")]
    for number, token in enumerate(tokens, 1):
        if problem := _problem(token):
            return [differs(problem, token=number)]
    return [equal()]


def _problem(token: Token) -> str:
    scores = [score for _, score in token.top]
    if any(score > 0 for score in scores):
        return "a log-probability is above 0"
    if (total := sum(map(exp, scores))) > _MAX_SUM:
        return f"the probabilities of {shown(token.text)} and others add up to {total:.4f}"
    if scores != sorted(scores, reverse=True):
        return "top_logprobs are not sorted"
    if (token.text, token.logprob) not in token.top:
        return f"the greedy token {shown(token.text)} is not in top_logprobs"
    if token.logprob != scores[0]:
        return f"the greedy token {shown(token.text)} is not the likeliest"
    return ""


async def scoring(context: Context) -> Sequence[Finding]:
    """Score a generated text as a prompt, and compare the log-probabilities of its tokens."""
    if not context.has_scores:
        return [not_offered("no log-probabilities")]
    generated, ids = context.first, None
    try:
        answer = await context.ask({**GREEDY, "return_token_ids": True})
        if answer.prompt_token_ids and answer.output.token_ids:
            generated, ids = answer, [*answer.prompt_token_ids, *answer.output.token_ids]
    except NotOfferedError:
        pass  # the text itself is the prompt
    if ids is None and context.api.is_chat:
        return [not_offered("no token ids of the chat, which the scoring needs")]
    scored = await _scores(context, ids or SUBJECT + generated.output.text)
    if isinstance(scored, Finding):
        return [scored]
    expected = generated.output.tokens
    if len(scored) < len(expected):
        return [not_offered("echo gives no log-probabilities of the prompt")]
    tail = scored[len(scored) - len(expected) :]
    if ids is None and [token.text for token in tail] != [token.text for token in expected]:
        return [not_offered("the prompt has other tokens than the generated text")]
    pairs = list(zip(expected, tail, strict=True))
    wrong = [n for n, (one, other) in enumerate(pairs) if one.logprob != other.logprob]
    if wrong:
        largest = max(abs(one.logprob - other.logprob) for one, other in pairs)
        return [differs(f"largest difference {largest:.2g}", token=wrong[0] + 1)]
    return [equal(f"{len(pairs)} tokens")]


async def _scores(context: Context, prompt: str | list[int]) -> list[Token] | Finding:
    """The scored tokens of a prompt, by `echo` or else by vLLM's `prompt_logprobs`."""
    path = APIS[1].path
    base: dict[str, Any] = {"model": context.model, "prompt": prompt, "temperature": 0}
    try:
        body = await context.client.post(
            path, {**base, "echo": True, "logprobs": 1, "max_tokens": 0}, Body
        )
        if body.choices and (tokens := scored_tokens(body.choices[0].logprobs)):
            return list(tokens)
    except NotOfferedError as error:
        refusal = not_offered(f"echo: {error}")
    except ValueError as error:
        return differs(str(error))
    else:
        refusal = not_offered("echo gives no log-probabilities of the prompt")
    if isinstance(prompt, str):
        return refusal
    try:
        body = await context.client.post(
            path, {**base, "prompt_logprobs": 0, "max_tokens": 1}, Body
        )
    except NotOfferedError:
        return refusal
    entries = body.prompt_logprobs or (body.choices and body.choices[0].prompt_logprobs)
    if not entries or len(entries) != len(prompt):
        return refusal
    return [_by_id(entry, token) for entry, token in zip(entries, prompt, strict=True)]


def _by_id(entry: dict[str, Any] | None, token: int) -> Token:
    found = (entry or {}).get(str(token))
    score = found.get("logprob") if isinstance(found, dict) else None
    return Token(f"token_id:{token}", score if isinstance(score, float) else NO_LOGPROB)
