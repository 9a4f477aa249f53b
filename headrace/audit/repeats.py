"""Probes that send the same request again: alone, in a crowd, with a prefix hit, to another
server.
"""

from collections.abc import Sequence

from headrace.audit.answers import Answer
from headrace.audit.client import FailedError, NotOfferedError
from headrace.audit.compare import (
    Finding,
    Result,
    compare_scores,
    compare_texts,
    equal,
    not_offered,
)
from headrace.audit.context import GREEDY, SAMPLED, Context, Fields

NUM_IN_CROWD = 3
"""Equal requests in one crowd."""
_PREFIX_WORDS = 90
_WORDS = "the mill wheel turns and water falls from a high gate into every stone channel".split()


async def same_alone(context: Context) -> Sequence[Finding]:
    """Send a greedy request a second time."""
    return _both(context.first, await context.ask())


async def same_in_crowd(context: Context) -> Sequence[Finding]:
    """Send a greedy request several times among others."""
    answers = await context.in_crowd([GREEDY] * NUM_IN_CROWD)
    return _worst([_both(context.first, answer) for answer in answers])


async def sampled(context: Context) -> Sequence[Finding]:
    """Send a sampled request with a seed alone, again, and among others."""
    alone = await context.ask(SAMPLED)
    again = await context.ask(SAMPLED)
    answers = await context.in_crowd([SAMPLED] * NUM_IN_CROWD)
    crowd = _worst([_both(alone, answer) for answer in answers])
    return [compare_texts(alone.outputs, again.outputs), *crowd]


async def prefix_hit(context: Context) -> Sequence[Finding]:
    """Send a long prompt that the server has never seen, then the same prompt again."""
    words = context.rng.choices(_WORDS, k=_PREFIX_WORDS)
    prompt = " ".join([f"{context.rng.randrange(10**9)}:", *words])
    miss = await context.ask(GREEDY, prompt)
    hit = await context.ask(GREEDY, prompt)
    note = _cached(miss, hit)
    text, scores = _both(miss, hit)
    found = [_with_note(text, note), scores]
    try:
        without = await context.ask({**GREEDY, "cache_prompt": False}, prompt)
    except NotOfferedError as error:
        return [*found, not_offered(str(error))]
    if without.usage is None or without.usage.cached is None:
        return [*found, not_offered("no answer reports cached_tokens")]
    if without.usage.cached:
        detail = f"with cache_prompt false, {without.usage.cached} tokens come from the cache"
        return [*found, not_offered(detail)]
    return [*found, compare_texts(miss.outputs, without.outputs)]


async def drafts(context: Context) -> Sequence[Finding]:
    """Turn drafts off by the field of one request, if the server reports drafts."""
    if context.first.num_drafted is None:
        return [not_offered("no answer reports draft tokens")]
    answer = await context.ask({**GREEDY, "speculative.n_max": 0})
    if answer.num_drafted:
        return [not_offered(f"with speculative.n_max 0, {answer.num_drafted} tokens are drafted")]
    return [compare_texts(context.first.outputs, answer.outputs)]


async def other_server(context: Context) -> Sequence[Finding]:
    """Send a greedy and a sampled request to both servers."""
    if context.against is None:
        return [not_offered("no second server")] * 3
    try:
        greedy = await context.ask_other(context.against, GREEDY)
        drawn = await context.ask_other(context.against, SAMPLED)
    except (NotOfferedError, FailedError) as error:
        raise FailedError(f"the second server: {error}") from None
    own = await context.ask(SAMPLED)
    return [*_both(context.first, greedy), compare_texts(own.outputs, drawn.outputs)]


async def several(context: Context) -> Sequence[Finding]:
    """Ask for two outputs: greedy ones are equal, sampled ones may have the next seed each."""
    greedy = await context.ask({**GREEDY, "n": 2})
    if len(greedy.outputs) != 2:
        return [not_offered(f"n = 2 gives {len(greedy.outputs)} outputs")] * 2
    same = compare_texts(context.first.outputs * 2, greedy.outputs)
    fields: Fields = {**SAMPLED, "n": 2}
    pair = await context.ask(fields)
    singles = [await context.ask({**SAMPLED, "seed": SAMPLED["seed"] + i}) for i in range(2)]
    expected = [answer.output for answer in singles]
    seeds = compare_texts(expected, pair.outputs)
    if seeds.result is not Result.EQUAL:
        seeds = not_offered("the outputs have other seeds than N and N + 1")
    return [same, seeds]


def _both(expected: Answer, actual: Answer) -> list[Finding]:
    return [
        compare_texts(expected.outputs, actual.outputs),
        compare_scores(expected.outputs, actual.outputs),
    ]


def _worst(pairs: Sequence[Sequence[Finding]]) -> list[Finding]:
    """The first difference of each row."""
    return [
        next((one for one in row if one.result is not Result.EQUAL), row[0])
        for row in zip(*pairs, strict=True)
    ]


def _cached(miss: Answer, hit: Answer) -> str:
    counts = [answer.usage and answer.usage.cached for answer in (miss, hit)]
    if None in counts or hit.usage is None:
        return "no answer reports cached_tokens"
    return f"{counts[0]} and {counts[1]} of {hit.usage.prompt_tokens} tokens cached"


def _with_note(finding: Finding, note: str) -> Finding:
    if finding.result is Result.EQUAL:
        return equal(note)
    return Finding(
        result=finding.result,
        detail=f"{finding.detail} ({note})",
        token=finding.token,
        expected=finding.expected,
        actual=finding.actual,
    )
