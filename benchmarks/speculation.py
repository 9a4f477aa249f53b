"""Speed-up by speculation: four kinds of work with the default model, proposers and plain decoding
in turns.

All methods take turns in one engine, because two copies of a model differ in speed by some percent,
depending on their place in memory. In each round all methods answer the same new prompts greedily,
and ratios are formed within the round. Output tokens per second count from the first token of the
first answer to the end of the last answer. A different answer, or a failed proposer, ends
the program.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from speculation_texts import WORKLOADS, prompts

from headrace import LLM, SamplingParams
from headrace.outputs import RequestOutput
from headrace.speculation.manager import SpeculationManager
from headrace.speculation.proposers import METHODS, REQUIRED_OPTIONS, DraftModels, enabled_methods

WAYS = ("off", "again", "suffix", "lookahead", "jacobi", "auto")
TWIN = "again"
"""Plain decoding once more: the distance of its ratio from 1 is the noise of all ratios."""
TOKENS_OF_SEQUENCE = 512
_RUN = 4
"""Min length of a run of tokens that counts as repeated from the prompt."""


class Turn(NamedTuple):
    """The results of one method in one round."""

    speed: float
    tokens: int
    proposed: int
    accepted: int
    repeated: float
    """Share of the output that repeats the prompt."""
    work: float
    """Share of the time in the proposers and in the decisions about drafts."""


class TimedManager(SpeculationManager):
    """Speculation that counts the seconds of its own work."""

    seconds = 0.0

    def plan(self, *args: Any) -> Any:
        return self._timed(super().plan, *args)

    def draft(self, *args: Any) -> Any:
        return self._timed(super().draft, *args)

    def observe(self, *args: Any, **options: Any) -> Any:
        return self._timed(super().observe, *args, **options)

    def _timed(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = perf_counter()
        try:
            return function(*args, **options)
        finally:
            self.seconds += perf_counter() - start


def measure(
    llm: LLM, texts: list[str], max_tokens: int, manager: TimedManager
) -> tuple[Turn, list[list[int]]]:
    """Run one turn, and return the tokens of the answers."""
    manager.seconds = 0.0
    started = perf_counter()
    results = llm.chat(
        [[{"role": "user", "content": text}] for text in texts],
        SamplingParams(temperature=0, max_tokens=max_tokens),
    )
    work = manager.seconds / (perf_counter() - started)
    tokens = [result.outputs[0].token_ids for result in results]
    num_tokens = sum(map(len, tokens))
    first = min(result.timing.queue + result.timing.prefill for result in results)
    end = max(
        sum((result.timing.queue, result.timing.prefill, result.timing.decode))
        for result in results
    )
    books = [books for result in results for books in result.drafts.values()]
    accepted = sum(book.accepted for book in books)
    repeated = sum(repeated_tokens(result) for result in results) / num_tokens
    return Turn(
        num_tokens / (end - first),
        num_tokens,
        sum(book.proposed for book in books),
        accepted,
        repeated,
        work,
    ), tokens


def repeated_tokens(result: RequestOutput) -> int:
    """Output tokens in runs that the prompt contains."""
    prompt, output = result.prompt_token_ids, result.outputs[0].token_ids
    runs = {tuple(prompt[i : i + _RUN]) for i in range(len(prompt) - _RUN + 1)}
    starts = [i for i in range(len(output) - _RUN + 1) if tuple(output[i : i + _RUN]) in runs]
    return len({i + k for i in starts for k in range(_RUN)})


def row(
    workload: str, batch: int, method: str, turns: list[Turn], plain: list[Turn]
) -> dict[str, object]:
    """A line of the result."""
    ratios = [turn.speed / other.speed for turn, other in zip(turns, plain, strict=True)]
    tokens, proposed, accepted = (
        sum(getattr(turn, name) for turn in turns) for name in ("tokens", "proposed", "accepted")
    )
    return {
        "workload": workload,
        "batch": batch,
        "method": method,
        "ratio": {
            "median": median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "rounds": len(ratios),
        },
        "tokens_per_second": median(turn.speed for turn in turns),
        "tokens_per_step": tokens / max(1, tokens - accepted),
        "proposed_per_token": proposed / tokens,
        "acceptance": accepted / proposed if proposed else 0.0,
        "repeated": sum(turn.repeated * turn.tokens for turn in turns) / tokens,
        "work": median(turn.work for turn in turns),
    }


def show(line: dict[str, object]) -> str:
    ratio = line["ratio"]
    assert isinstance(ratio, dict)
    spread = f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
    return (
        f"{line['workload']:10}{line['batch']:>6}  "
        f"{line['method']:10}{spread:>18}{line['tokens_per_second']:>9,.0f}"
        f"{line['tokens_per_step']:>13.2f}{line['proposed_per_token']:>10.2f}{line['acceptance']:>12.0%}{line['repeated']:>10.0%}{line['work']:>8.1%}"
    )


HEADINGS = (
    f"{'workload':10}{'batch':>6}  "
    f"{'method':10}{'ratio to off':>18}{'tok/s':>9}"
    f"{'tokens/step':>13}{'drafted':>10}{'acceptance':>12}"
    f"{'repeated':>10}{'work':>8}"
)


def run(
    llm: LLM, ways: dict[str, TimedManager], args: argparse.Namespace
) -> Iterable[dict[str, object]]:
    variant = 0
    for workload in args.workloads:
        for batch in args.batches:
            turns: dict[str, list[Turn]] = {method: [] for method in ways}
            for turn in range(
                args.rounds + 1
            ):  # the first round is not counted: what steps cost must be learned
                texts = prompts(workload, variant, batch)
                variant += batch
                order = list(ways) if turn % 2 else list(ways)[::-1]
                answers = {}
                for method in order:
                    llm._engine._speculation = llm._engine._loop.speculation = ways[method]
                    result, answers[method] = measure(llm, texts, args.max_tokens, ways[method])
                    turns[method] += [result] if turn else []
                if wrong := [method for method in ways if answers[method] != answers["off"]]:
                    sys.exit(f"{', '.join(wrong)} answered otherwise than plain decoding")
            if failed := [method for method, manager in ways.items() if manager.failures]:
                sys.exit(f"{', '.join(failed)} failed, and drafted no more: see the log above")
            for method in ways:
                yield row(workload, batch, method, turns[method], turns["off"])


def speculation(llm: LLM, method: str) -> TimedManager:
    """A proposer for this engine, which has all draft models."""
    engine = llm._engine
    models = {
        name: guard._proposer
        for name, guard in engine._speculation._guards.items()
        if name in REQUIRED_OPTIONS
    }
    named: dict[str, Any] = {"proposer": "off" if method == TWIN else method}
    config = replace(engine.config, **named)
    proposers = {
        name: models.get(name) or METHODS[name](config, DraftModels())
        for name in enabled_methods(config)
    }
    return TimedManager(proposers, config, engine.limits.vocab_size, perf_counter)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument(
        "--batches", type=lambda text: [int(word) for word in text.split(",")], default=[1, 8, 32]
    )
    parser.add_argument(
        "--workloads",
        type=lambda text: text.split(","),
        default=list(WORKLOADS),
        help=f"kinds of work: {', '.join(WORKLOADS)}",
    )
    parser.add_argument(
        "--methods",
        type=lambda text: text.split(","),
        default=list(WAYS),
        help=f"of {', '.join((*WAYS, *REQUIRED_OPTIONS))}",
    )
    parser.add_argument(
        "--no-control", action="store_true", help="use all drafts, even if they do not pay"
    )
    parser.add_argument(
        "--draft-model", metavar="MODEL", help="draft model of draft_model and auto"
    )
    parser.add_argument("--draft-depth", type=int, default=0, help="max tokens of a chain")
    parser.add_argument(
        "--draft-layers", metavar="LAYERS", help="draft layers of self_draft and auto"
    )
    parser.add_argument(
        "--medusa-heads", metavar="FILE", help="file with the heads of medusa and auto"
    )
    parser.add_argument("--json", type=Path, help="file for the lines as JSON")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, as a test that does not measure",
    )
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.max_tokens, args.batches = 1, 12, [1, 2]
    methods = ["off", *(method for method in args.methods if method != "off")]
    blocks = max(args.batches) * TOKENS_OF_SEQUENCE // 32
    options = {"threads": args.threads, "kv_blocks": blocks, "max_model_len": 2048}
    models = {
        option: value
        for option in ("draft_model", "draft_depth", "draft_layers", "medusa_heads")
        if (value := getattr(args, option))
    }
    llm = LLM(
        args.model,
        proposer="auto",
        prefix_cache=False,
        adaptive_speculation=not args.no_control,
        **options,
        **models,
    )
    ways = {method: speculation(llm, method) for method in methods}
    lines = []
    print(HEADINGS, flush=True)
    for line in run(llm, ways, args):
        print(show(line), flush=True)
        lines.append(line)
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    llm.close()


if __name__ == "__main__":
    main()
