"""Methods that must not change a token, options, and cases that cover every pair of options.

`python -m tests.composability` writes docs/internals/composability.md, which a test compares. A new
method is one more entry of METHODS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

from headrace.engine.engine import Stats
from headrace.model.spec import ExpertSpec
from headrace.speculation.proposers import PROPOSERS, REQUIRED_OPTIONS
from headrace.structured_outputs import StructuredOutputs
from tests.calibration_files import EXIT, THRESHOLDS

PAGE = Path(__file__).parents[1] / "docs/internals/composability.md"


@dataclass(frozen=True)
class Method:
    """A method that must not change a token."""

    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine."""
    draft: Mapping[str, Any] | None = None
    """Arguments of `draft_engines.draft_engine`, for a method that drafts with a model."""
    happened: Callable[[Stats], bool] = lambda stats: stats.drafted > 0
    """Whether the method had an effect, by the statistics of a run."""


TITLES = {
    "suffix": "suffix tree",
    "jacobi": "Jacobi",
    "lookahead": "lookahead",
    "auto": "auto",
}
METHODS = [
    *(
        Method(TITLES[name], {"proposer": name, "adaptive_speculation": False})
        for name in PROPOSERS
        if name not in REQUIRED_OPTIONS and name != "off"
    ),
    Method("auto, adaptive", {"proposer": "auto"}, happened=lambda stats: stats.steps > 0),
    Method("draft model", draft={"how": "draft_model"}),
    Method(
        "draft model, other tokens",
        draft={"how": "draft_model", "draft_tokens": "shared", "width": 2},
    ),
    Method("draft model, few shared tokens", draft={"how": "draft_model", "draft_tokens": "other"}),
    Method("EAGLE-3 drafter", draft={"how": "draft_model", "drafter": "EAGLE-3", "width": 2}),
    Method("EAGLE-1 drafter", draft={"how": "draft_model", "drafter": "EAGLE-1", "depth": 3}),
    Method("MTP layer", draft={"how": "draft_model", "drafter": "MTP", "depth": 2, "width": 2}),
    Method("first layers", draft={"how": "self_draft", "depth": 3, "width": 2}),
    Method("listed layers", draft={"how": "self_draft", "layers": (1,), "depth": 3}),
    Method("2:4 weights", draft={"how": "self_draft", "format": "int8-2:4", "depth": 3}),
    Method("best blocks", draft={"how": "self_draft", "draft_top_blocks": 1, "depth": 3}),
    Method("thresholds", draft={"how": "self_draft", "draft_sparsity": THRESHOLDS, "depth": 3}),
    Method("Medusa heads", draft={"how": "medusa", "depth": 3, "width": 2}),
    Method("auto with all of these", draft={"how": "auto", "depth": 3}),
    Method(
        "auto with all of these, adaptive",
        {"adaptive_speculation": True},
        {"how": "auto"},
        happened=lambda stats: stats.steps > 0,
    ),
]


@dataclass(frozen=True, eq=False)
class Option:
    """An option of a request, an engine or a model."""

    title: str
    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the requests."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine under test only, and not of the plain engine of the comparison."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model in both engines."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `tests.tiny.tiny_model` for a mode."""


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
"""Alternatives; a case chooses one option of each pair."""

ALL_MODES: dict[str, Any] = {
    "attention_window": 140,
    "attention_sinks": 2,
    "attention_top_blocks": 1,
    "activation_sparsity": THRESHOLDS,
    "early_exit": EXIT,
}
MODES = [
    Option("attention window", model={"attention_window": 40, "attention_sinks": 2}),
    Option("top blocks", model={"attention_top_blocks": 1}),
    Option(
        "skipped zeros",
        engine={"skip_zeros": True},
        shape={"format": "Q4_0", "activation": "relu", "mlp_bias": True},
    ),
    Option("thresholds", model={"activation_sparsity": THRESHOLDS}, shape={"format": "Q4_0"}),
    Option("early exit", model={"early_exit": EXIT}),
    Option("2:4 weights", shape={"format": "int8-2:4"}),
    Option(
        "experts",
        shape={
            "architecture": "qwen2_moe",
            "qkv_bias": True,
            "experts": ExpertSpec(4, 2, 32, normalised=False, shared_ffn_dim=32),
        },
    ),
    Option("all lossy options", model=ALL_MODES, shape={"format": "Q4_0"}),
]
"""Modes with fewer bytes. The plain engine of the comparison is in the mode too, and reads zeros.
"""

OPTIONS = [option for axis in AXES for option in axis if option.title]

Case = tuple[Option, ...]


def pairwise_cases() -> list[Case]:
    """Cases that cover every pair of options of different axes.

    Each case is chosen greedily: it covers the most pairs that no earlier case covers.
    """
    everything = list(product(*([0, 1] for _ in AXES)))
    axes = list(combinations(range(len(AXES)), 2))
    pairs = [
        sum(1 << 4 * k + 2 * case[i] + case[j] for k, (i, j) in enumerate(axes))
        for case in everything
    ]
    uncovered = (1 << 4 * len(axes)) - 1
    cases: list[Case] = []
    while uncovered:
        best = max(range(len(everything)), key=lambda at: (pairs[at] & uncovered).bit_count())
        uncovered &= ~pairs[best]
        cases.append(
            tuple(axis[choice] for axis, choice in zip(AXES, everything[best], strict=True))
        )
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
"""Cases on the default model, which has 4-bit weights: a prompt, and the titles of its options."""


FEW_BLOCKS = Option("preemption", params={"n": 3}, engine={"slots": 384})
"""Blocks for the prompts, and not for all outputs at once."""
ADAPTERS = Option("adapters")
INT4_KV = Option("int4 KV", model={"kv_dtype": "int4"})
STATIC = Option("static batching", engine={"batching": "static"})
RANKS = Option("two ranks", params={"max_tokens": 16})
SEARCH = Option("beam search")
NAMED = {option.title: option for option in OPTIONS}

MODE_AXES = [*(option for option in OPTIONS if option.title != "int4 weights"), INT4_KV, ADAPTERS]
MODE_AXES += [STATIC, RANKS, SEARCH]
"""Options that are tried in each mode. Preemption has other blocks here."""


def _named(*titles: str) -> Case:
    return tuple(NAMED[title] for title in titles)


EVERY_METHOD: list[Case] = [
    (
        *_named("greedy"),
        *(on for _, on in AXES if on.title not in ("sampled", "int4 weights", "preemption")),
    ),
    (*_named("sampled"), FEW_BLOCKS),
]
"""Greedy with nearly all options, and sampled with few blocks."""
SOME_METHODS: list[Case] = [
    (*_named("greedy", "logprobs", "chunked prefill", "prefix cache"), INT4_KV, ADAPTERS, RANKS),
    (*_named("sampled", "grammar", "n = 4"), ADAPTERS, STATIC, SEARCH),
]
SOME = ["suffix tree", "auto with all of these"]
"""Methods that stand for the others: tokens without a model, and all models."""

REFUSED = {("listed layers", "early exit"), ("listed layers", "all lossy options")}
"""Methods and modes that the loader refuses together: the first of `REFUSALS`."""


class Refusal(NamedTuple):
    """Options that do not combine, and a part of the message at start-up."""

    mode: str
    options: Mapping[str, Any]
    message: str


REFUSALS = [
    Refusal(
        "early_exit",
        {"proposer": "self_draft", "draft_layers": "1-1"},
        "draft_layers is set, and with early_exit the layers before the exit draft",
    ),
    Refusal(
        "early_exit",
        {"pipeline_parallel_size": 2},
        "early_exit needs all layers in one pipeline stage",
    ),
    Refusal(
        "skip_zeros",
        {"backend": "cuda"},
        "skip_zeros is for CPUs: the kernels of GPUs read whole matrices",
    ),
    Refusal(
        "attention_top_blocks",
        {"backend": "cuda"},
        "attention_top_blocks 1 is not supported on cuda; choose backend cpu",
    ),
    Refusal(
        "draft_top_blocks",
        {"backend": "cuda", "proposer": "self_draft"},
        "draft_top_blocks 1 is not supported on cuda; choose backend cpu",
    ),
    Refusal(
        "attention_top_blocks",
        {"tensor_parallel_size": 4},
        "4 ranks divide the query heads of a KV head, which choose blocks of KV together; use at "
        "most 2 ranks",
    ),
]

ModeCase = tuple[Method, Option, Case]

MODE_CASES: list[ModeCase] = [
    (method, mode, case)
    for mode in MODES
    for method in METHODS
    if (method.title, mode.title) not in REFUSED
    for case in (*EVERY_METHOD, *(SOME_METHODS if method.title in SOME else ()))
]


def mode_title(case: ModeCase) -> str:
    method, mode, options = case
    return f"{mode.title}, {method.title}, {title(options)}"


def title(case: Case) -> str:
    """Title of a case, for the page and for test ids."""
    return ", ".join(option.title for option in case if option.title)


def page() -> str:
    """The text of docs/internals/composability.md."""
    lines = [
        "# What composes with what",
        "",
        "`python -m tests.composability` writes this page from the cases that",
        "`tests/engine/test_composability.py` runs; a test fails if the page is stale.",
        "In each case token ids, text and log-probabilities must equal plain decoding to the last "
        "bit.",
        "Plain decoding runs the request alone, in one piece and without drafts,",
        "with the same weights and KV format, on the `cpu` backend.",
        "",
        f"Each method runs {len(CASES)} cases on a tiny model, which cover every pair of options.",
        f"Methods without a model of their own run {len(REAL_CASES)} more cases on the default "
        "model",
        "(`tests/engine/test_drafts_real.py` runs the other methods on it).",
        "A cell is the number of cases with the option.",
        "With the prefix cache, one request is sent twice.",
        "Each method also runs in one batch with beam searches, and neither changes the other's "
        "output.",
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
        lines.append(f"| {method.title} | {' | '.join(map(str, counts))} |")
    lines += ["", *_modes(), "", "The cases on the tiny model:"]
    lines += [f"* {title(case)}" for case in CASES]
    lines += ["", "On the default model:"]
    lines += [
        f"* {', '.join(titles)}: `{prompt[:40].splitlines()[0]}...`"
        for prompt, titles in REAL_CASES
    ]
    return "\n".join(lines) + "\n"


def _modes() -> list[str]:
    heads = " | ".join(mode.title for mode in MODES)
    lines = [
        "## Modes with fewer bytes",
        "",
        "A lossy mode is a model of its own, so plain decoding is in the mode too.",
        "`skip_zeros` is exact: plain decoding reads whole matrices.",
        f"The last mode is {', '.join(f'`{name}`' for name in ALL_MODES)}.",
        f"{len(MODE_CASES)} cases have three requests of up to 170 tokens in one batch.",
        "Two ranks share each matrix. With adapters, each request has another one, or none.",
        "A cell is the number of cases.",
        "",
        f"| in one batch with | {heads} |",
        f"|---|{'---|' * len(MODES)}",
    ]
    for option in MODE_AXES:
        counts = [
            sum(
                one is mode and option.title in (other.title for other in case)
                for _, one, case in MODE_CASES
            )
            for mode in MODES
        ]
        lines.append(f"| {option.title} | {' | '.join(map(str, counts))} |")
    lines += ["", f"| drafts by | {heads} |", f"|---|{'---|' * len(MODES)}"]
    for method in METHODS:
        cells = [
            "refused"
            if (method.title, mode.title) in REFUSED
            else str(sum((a, b) == (method, mode) for a, b, _ in MODE_CASES))
            for mode in MODES
        ]
        lines.append(f"| {method.title} | {' | '.join(cells)} |")
    lines += ["", "Start-up refuses these together, and its message names the change:"]
    for refusal in REFUSALS:
        options = " and ".join(f"`{name}={value}`" for name, value in refusal.options.items())
        lines.append(f"* `{refusal.mode}` with {options}: {refusal.message}.")
    lines += ["", "The cases in modes:"]
    lines += [f"* {title(case)}" for case in EVERY_METHOD]
    lines += [f"* {title(case)}: {' and '.join(SOME)}" for case in SOME_METHODS]
    return lines


if __name__ == "__main__":
    PAGE.write_text(page())
