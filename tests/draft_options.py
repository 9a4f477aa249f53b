"""Options of requests under each proposer, and the page about them.

`python -m tests.draft_options` writes docs/internals/draft_options.md, which a test compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.structured_outputs import StructuredOutputs
from tests.composability import METHODS

PAGE = Path(__file__).parents[1] / "docs/internals/draft_options.md"


@dataclass(frozen=True, eq=False)
class RequestOption:
    """An option of a request, or a kind of request in the same batch."""

    title: str
    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the requests."""
    adapter: bool = False
    embedding: bool = False
    """Whether embedding requests are in the same batch."""
    drafts: bool = True
    """Whether the requests have drafts."""


SAMPLED: Mapping[str, Any] = {"temperature": 0.8, "seed": 5}
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
GRAMMAR = StructuredOutputs(regex="([b-t]|a[^a])*")
OPTIONS = [
    RequestOption("greedy", GREEDY),
    RequestOption("temperature", SAMPLED),
    RequestOption("another seed", {**SAMPLED, "seed": 6}),
    RequestOption("top_k, top_p", {**SAMPLED, "top_k": 9, "top_p": 0.8}),
    RequestOption("min_p", {**SAMPLED, "min_p": 0.08}),
    RequestOption(
        "penalties",
        {**SAMPLED, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    ),
    RequestOption("logit_bias", {**GREEDY, "logit_bias": {4: 2.0, 9: -100.0}}),
    RequestOption("allowed_token_ids", {**SAMPLED, "allowed_token_ids": list(range(2, 20))}),
    RequestOption("logprobs", {**SAMPLED, "logprobs": 3}),
    RequestOption("logprob_token_ids", {**SAMPLED, "logprob_token_ids": [3, 9], "logprobs": 0}),
    RequestOption("prompt_logprobs", {**GREEDY, "prompt_logprobs": 2}),
    RequestOption("n", {**SAMPLED, "n": 3, "logprobs": 1}),
    RequestOption("beam_width", {"beam_width": 3, "n": 3}, drafts=False),
    RequestOption("structured_outputs", {**SAMPLED, "structured_outputs": GRAMMAR}),
    RequestOption("stop", {**SAMPLED, "stop": ["ad", "t"], "min_tokens": 30}),
    RequestOption("stop_token_ids", {**SAMPLED, "stop_token_ids": [7], "min_tokens": 30}),
    RequestOption("adapter", {**SAMPLED, "logprobs": 1}, adapter=True),
    RequestOption("embeddings in the batch", {**SAMPLED, "logprobs": 1}, embedding=True),
]


def page() -> str:
    """The text of docs/internals/draft_options.md."""
    titles = [method.title for method in METHODS]
    lines = [
        "# Options under drafts",
        "",
        "`python -m tests.draft_options` writes this page from the cases that",
        "`tests/engine/test_draft_options.py` runs; a test fails if the page is stale.",
        "",
        "**Drafts change no result.** With exact verification, the default, token ids, text,",
        "finish reason and log-probabilities are equal to plain decoding, to the last bit, on the",
        "`cpu` backend.",
        "",
        "**Log-probabilities of generation and of scoring are equal to the bit.** A request with",
        "`logprobs` gives each new token the float that `prompt_logprobs` gives the same token",
        "when the text is scored, with and without drafts. So reinforcement learning needs no",
        "second pass over its samples, and an importance ratio of unchanged weights is exactly 1.",
        "",
        "Each cell is one test: two requests with the option, in one batch, against plain decoding",
        "of each request alone. `=`: equal, and drafts were verified (adaptive ones, if they pay).",
        "`= plain`: equal, and the requests run without drafts.",
        "[What composes](composability.md) has the combinations of options.",
        "",
        f"| option | {' | '.join(titles)} |",
        f"|---|{'---|' * len(titles)}",
    ]
    for option in OPTIONS:
        cell = "=" if option.drafts else "= plain"
        lines.append(f"| {option.title} | {' | '.join([cell] * len(titles))} |")
    lines += [
        "",
        "A beam search has no drafts: each of its steps needs the best tokens of all beams.",
        "`acceptance_method` `rejection` and `typical` verify otherwise: their tokens may differ",
        "from plain decoding ([speculation](speculation.md#verification)).",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
