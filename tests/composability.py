"""Methods and options that are tested together: a case for every pair of options, and the page.

`python -m tests.composability` writes docs/internals/composability.md, and a test compares it. A new
method is a new entry of METHODS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

from headrace.engine.engine import Stats
from headrace.speculation.proposers import PROPOSERS, REQUIRED_OPTION
from headrace.structured_outputs import StructuredOutputs

PAGE = Path(__file__).parents[1] / "docs/internals/composability.md"


@dataclass(frozen=True)
class Method:
    """A feature that must not change a token."""

    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine."""
    draft: Mapping[str, Any] | None = None
    """Arguments of `tests/draft_engines.py` for a method with a draft model; other methods use
    `options`.
    """
    happened: Callable[[Stats], bool] = lambda stats: stats.drafted > 0
    """Whether the method took part in the run."""


TITLES = {
    "ngram": "n-gram",
    "online": "online table",
    "jacobi": "Jacobi",
    "lookahead": "lookahead",
    "auto": "auto",
}
METHODS = [
    *(
        Method(TITLES[name], {"proposer": name, "adaptive_speculation": False})
        for name in PROPOSERS
        if name not in REQUIRED_OPTION and name != "off"
    ),
    Method("auto, controlled", {"proposer": "auto"}, happened=lambda stats: stats.steps > 0),
    Method("draft model", draft={"how": "draft_model"}),
    Method("first layers", draft={"how": "self_draft", "depth": 3, "width": 2}),
    Method("Medusa heads", draft={"how": "medusa", "depth": 3, "width": 2}),
    Method("auto with all of these", draft={"how": "auto", "depth": 3}),
    Method(
        "auto with all of these, controlled",
        {"adaptive_speculation": True},
        {"how": "auto"},
        happened=lambda stats: stats.steps > 0,
    ),
]


@dataclass(frozen=True, eq=False)
class Option:
    """An option of a request or an engine, and its alternative."""

    title: str
    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the requests."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine under test; the plain engine that it is compared with has none."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model, and of both engines."""


PLAIN = Option("")
AXES: list[tuple[Option, Option]] = [
    (
        Option("greedy", {"temperature": 0.0}),
        Option("sampled", {"temperature": 0.7, "top_p": 0.95}),
    ),
    (
        PLAIN,
        Option(
            "penalties",
            {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        ),
    ),
    (PLAIN, Option("logit bias", {"logit_bias": {4: 2.0, 9: -100.0}})),
    (PLAIN, Option("grammar", {"structured_outputs": StructuredOutputs(regex="([b-t]|a[^a])*")})),
    (PLAIN, Option("stop strings", {"stop": ["ad", "t"], "min_tokens": 36})),
    (PLAIN, Option("logprobs", {"logprobs": 3, "prompt_logprobs": 1})),
    (PLAIN, Option("n = 4", {"n": 4})),
    (PLAIN, Option("chunked prefill", engine={"max_num_batched_tokens": 7})),
    (PLAIN, Option("preemption", engine={"slots": 96})),
    (PLAIN, Option("multi-step decoding", engine={"multi_step_ms": 1e6})),
    (
        Option("", engine={"prefix_cache": False}),
        Option("prefix cache", engine={"prefix_cache": True}),
    ),
    (PLAIN, Option("int8 KV", model={"kv_dtype": "int8"})),
    (PLAIN, Option("int4 weights", model={"format": "Q4_0"})),
]
"""Alternatives; a case takes one option of each pair."""

OPTIONS = [option for axis in AXES for option in axis if option.title]

Case = tuple[Option, ...]


def pairwise_cases() -> list[Case]:
    """Return cases that contain every pair of options of different axes.

    Greedy: each new case covers the most missing pairs.
    """
    everything = [tuple(case) for case in product(*([0, 1] for _ in AXES))]

    def pairs(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, j, case[i], case[j]) for i, j in combinations(range(len(case)), 2)}

    num_uncomputed = set().union(*map(pairs, everything))
    cases: list[Case] = []
    while num_uncomputed:
        best = max(everything, key=lambda case: len(pairs(case) & num_uncomputed))
        num_uncomputed -= pairs(best)
        cases.append(tuple(axis[choice] for axis, choice in zip(AXES, best, strict=True)))
    return cases


CASES = pairwise_cases()

REAL_CASES: list[tuple[str, list[str]]] = [
    ("Repeat after me: one two three four. One two three four. One two", ["greedy", "logprobs"]),
    (
        "The list again, item by item: apple, pear, plum, apple, pear, plum, apple,",
        ["greedy", "penalties", "n = 4"],
    ),
    (
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a",
        ["sampled", "logprobs", "n = 4", "logit bias"],
    ),
    ("word " * 90, ["greedy", "chunked prefill", "logprobs"]),
    ("One, two, three. One, two,", ["sampled", "stop strings"]),
    (
        "Name three rivers of Europe, and the countries that they flow through.",
        ["sampled", "preemption"],
    ),
]
"""Prompts on the default model, whose weights have 4 bits, with options by title."""


def title(case: Case) -> str:
    """Return a readable title, which is also the test id."""
    return ", ".join(option.title for option in case if option.title)


def page() -> str:
    """Return the text of docs/internals/composability.md."""
    lines = [
        "# What composes with what",
        "",
        "Written by `python -m tests.composability` from the cases that "
        "`tests/engine/test_composability.py` runs; a test fails when it",
        "is stale. In each case token ids, text and log-probabilities must be equal to "
        "the last bit to those of plain decoding: the",
        "request alone, in one piece, without drafts, with the same weights and KV "
        "format, on the `cpu` backend.",
        "",
        f"Each method runs {len(CASES)} cases on a tiny model, in which every pair of "
        "options comes up, and those that need no model of",
        f"their own {len(REAL_CASES)} more on the default model "
        "(`tests/engine/test_drafts_real.py` has the others). A cell says in how",
        "many the option is. With the prefix cache one request comes again. Each method "
        "also runs beside beam searches in one batch, and",
        "neither changes what the other gives.",
        "",
        f"| method | {' | '.join(option.title for option in OPTIONS)} |",
        f"|---|{'---|' * len(OPTIONS)}",
    ]
    for method in METHODS:
        real = [] if method.draft else REAL_CASES
        counts = [
            sum(option in case for case in CASES)
            + sum(option.title in titles for _, titles in real)
            for option in OPTIONS
        ]
        lines.append(f"| {method.title} | {' | '.join(str(count) for count in counts)} |")
    lines += ["", "The cases on the tiny model:"]
    lines += [f"* {title(case)}" for case in CASES]
    lines += ["", "On the default model:"]
    lines += [
        f"* {', '.join(titles)}: `{prompt[:40].splitlines()[0]}...`"
        for prompt, titles in REAL_CASES
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
