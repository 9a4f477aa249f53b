"""Decoding speed of an early exit against the full model, in turns.

    headrace calibrate smollm2 --early-exit 0.05 --output exit.json
    python benchmarks/early_exit_speed.py smollm2 exit.json

The mode alone computes all layers of each row. With `self_draft`, the first layers draft the tokens
that leave, and one step computes their further layers together.
"""

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

from headrace import LLM, SamplingParams
from headrace.measure.calibrate import PROMPT

_COMMON: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 512, "kv_blocks": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("file")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    modes: dict[str, dict[str, Any]] = {
        "full model": {"proposer": "off"},
        "early exit": {"proposer": "off", "early_exit": args.file},
        "early exit, self_draft": {"proposer": "self_draft", "early_exit": args.file},
        "the same, always drafting": {
            "proposer": "self_draft",
            "early_exit": args.file,
            "adaptive_speculation": False,
        },
    }
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(LLM(args.model, **_COMMON, **options))
            for name, options in modes.items()
        }
        speeds: dict[str, list[float]] = {name: [] for name in modes}
        for turn in range(args.rounds + 1):
            for name, llm in engines.items():
                started = time.perf_counter()
                llm.generate(args.prompt, params)
                seconds = time.perf_counter() - started
                if turn:  # the first round warms up
                    speeds[name].append(args.tokens / seconds)
        drafts = {name: llm.stats() for name, llm in engines.items()}

    full = speeds["full model"]
    print("| mode | tokens/s | of the full model's | drafts, accepted |\n|---|---|---|---|")
    for name, each in speeds.items():
        ratios = [one / other for one, other in zip(each, full, strict=True)]
        print(
            f"| {name} | {statistics.median(each):.1f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"| {drafts[name].drafted:,}, {drafts[name].accepted:,} |"
        )


if __name__ == "__main__":
    main()
