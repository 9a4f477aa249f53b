"""All probes of an audit, with their rows and their requests."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from headrace.audit import options, repeats, scores, streams, usage
from headrace.audit.compare import Finding
from headrace.audit.context import Context

SCORES = "log-probabilities"


class Probe(NamedTuple):
    """A few requests that fill some rows of the table."""

    run: Callable[[Context], Awaitable[Sequence[Finding]]]
    rows: tuple[str, ...]
    requests: int
    """Max requests to one API, without the crowd."""
    crowds: int = 0
    """Crowds that it sends."""


PROBES = (
    Probe(repeats.same_alone, ("again", f"again: {SCORES}"), 1),
    Probe(
        repeats.same_in_crowd,
        ("in a crowd", f"in a crowd: {SCORES}"),
        repeats.NUM_IN_CROWD,
        1,
    ),
    Probe(
        repeats.sampled,
        ("sampled, again", "sampled, in a crowd", f"sampled, in a crowd: {SCORES}"),
        2 + repeats.NUM_IN_CROWD,
        1,
    ),
    Probe(
        repeats.prefix_hit,
        ("prefix hit", f"prefix hit: {SCORES}", "prefix cache off (cache_prompt)"),
        3,
    ),
    Probe(repeats.several, ("n = 2, greedy", "n = 2, seeds"), 4),
    Probe(
        streams.streamed,
        ("streamed", f"streamed: {SCORES}", "streamed: usage", "streamed: events"),
        1,
    ),
    Probe(streams.cancelled, ("after cancelled streams",), 1 + streams.NUM_CANCELLED),
    Probe(scores.top_tokens, (f"top {SCORES}",), 0),
    Probe(scores.scoring, (f"scoring: {SCORES}",), 3),
    Probe(
        options.under_load,
        tuple(f"{name}, in a crowd" for name in options.OPTIONS),
        2 * (len(options.OPTIONS) + 1),
        1,
    ),
    Probe(options.stop_strings, ("stop strings",), 2),
    Probe(options.max_tokens, ("max_tokens",), 1),
    Probe(options.unknown_field, ("unknown field",), 1),
    Probe(usage.counts, ("output tokens of usage", "prompt tokens of usage"), 2),
    Probe(repeats.drafts, ("drafts off (speculative.n_max)",), 1),
)
OTHER_SERVER = Probe(
    repeats.other_server,
    ("other server", f"other server: {SCORES}", "other server, sampled"),
    1,
)
