"""Ranks on GPUs: whether they have the bits of one rank, and the time of their exchanges.

    python benchmarks/cuda/ranks.py                 two tensor-parallel ranks, then two stages
    python benchmarks/cuda/ranks.py --ranks 4 --model hf:ORG/MODEL
    python benchmarks/cuda/ranks.py --smoke --model FOLDER    a tiny model in the interpreter

The first machine with two GPUs should run it before anything else: ranks have run in Triton's
interpreter only. The time of an exchange has its kernels, which put the numbers in their places.
Exit code 1 if a token or a log-probability differs.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PROMPTS = [list(range(20, 60)), [33, 44, 55] * 5, [77]]
ROWS = (1, 64, 512)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="name or path of a model")
    parser.add_argument("--ranks", type=int, default=2, help="number of GPUs")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a request")
    parser.add_argument("--smoke", action="store_true", help="few tokens, in the interpreter")
    return parser.parse_args()


def outputs(llm: Any, tokens: int) -> list[Any]:
    """Greedy and sampled requests, whose decode steps are graphs; twice, so that steps repeat."""
    from headrace import SamplingParams

    params = [
        SamplingParams(max_tokens=tokens, temperature=0.8 * (i % 2), seed=i, logprobs=1)
        for i in range(len(PROMPTS))
    ]
    return [
        (one.token_ids, one.logprobs)
        for _ in range(2)
        for output in llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
        for one in output.outputs
    ]


def exchange_times(llm: Any, rows: tuple[int, ...]) -> dict[int, dict[str, float]]:
    """Microseconds of each kind of op in a decode step of some rows, summed over the layers."""
    from tests.backend.batches import Sequence, batch_of

    executable = llm._engine._loop.executable
    groups, block = len(executable.kv_groups), executable._rank.config.kv.block_size
    times: dict[int, dict[str, float]] = {}
    for count in rows:
        sequences = [Sequence([0], block) for _ in range(count)]
        batch = batch_of(sequences, [[5]] * count, [([], [])] * count, False, groups)
        executable.profile(batch)  # the first run compiles
        ops = executable.profile(batch).ops
        times[count] = {name: 1e6 * seconds for name, seconds in ops.items()}
    return times


def main() -> int:
    args = parse()
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"
        args.tokens = 2
    from headrace import LLM

    options: dict[str, Any] = {"backend": "cuda", "max_model_len": 256, "max_num_seqs": 64}
    if args.smoke:
        options |= {"kv_blocks": 16, "max_num_seqs": 4}
    with LLM(args.model, **options) as llm:
        expected = outputs(llm, args.tokens)

    num_wrong = 0
    for field in ("tensor_parallel_size", "pipeline_parallel_size"):
        with LLM(args.model, **options, **{field: args.ranks}) as llm:
            is_equal = outputs(llm, args.tokens) == expected
            num_wrong += not is_equal
            print(f"{field} {args.ranks}: {'the bits of one rank' if is_equal else 'OTHER BITS'}")
            for count, ops in exchange_times(llm, (1,) if args.smoke else ROWS).items():
                total = sum(ops.values())
                named = ", ".join(
                    f"{name} {ops[name]:.0f}"
                    for name in ("embed_part", "all_gather", "owned_rows", "send", "receive")
                    if name in ops
                )
                print(f"  {count} rows: {total:.0f} us of ops on rank 0, of them {named}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
