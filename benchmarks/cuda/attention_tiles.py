"""Speed of other tiles of attention than `attention_tiles.py` chooses. They change no bit.

    python benchmarks/cuda/attention_tiles.py  writes benchmarks/cuda/results/<name of the GPU>.json
    python benchmarks/cuda/attention_tiles.py --kv int8
    python benchmarks/cuda/attention_tiles.py --smoke   whether it runs, in Triton's interpreter

For each KV dtype and each step it prints the time of a layer's attention, with each tile.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import programs  # before torch, which must know where kernels run
from programs import decoding, executable_of, plan_of, sequences_of, step_of
from results import Results

from headrace.backend.cuda import step_attention
from headrace.backend.cuda.attention_tiles import Tiles, tiles_for
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.timing import seconds
from headrace.backend_traits import KvDtype
from headrace.batch import RaggedBatch
from tests.backend.cuda.hollow import SPECS

LAYERS = 4
KINDS: tuple[KvDtype, ...] = ("bf16", "fp8", "int8")
STEPS = {
    "1 x 512": (1, 512, 1),
    "1 x 4,096": (1, 4096, 1),
    "1 x 32,768": (1, 32_768, 1),
    "64 x 4,096": (64, 4096, 1),
    "a prompt of 2,048": (1, 0, 2048),
    "512 after 2,048": (1, 2048, 512),
}
"""Sequences, tokens before the step, and rows of each."""


def others(chosen: Tiles) -> Iterator[tuple[str, Tiles]]:
    """Alternatives with the same keys in a tile and the same splits, by name."""
    yield "chosen", chosen
    for stages in (2, 3, 4, 5):
        if stages != chosen.num_stages:
            yield f"{stages} stages", chosen._replace(num_stages=stages)
    yield "half of the programs", chosen._replace(programs=chosen.programs // 2)
    yield "8 warps", chosen._replace(num_warps=8)
    if chosen.narrow:
        yield "128 rows, 8 warps", chosen._replace(rows=128, num_warps=8)
        yield "32 rows", chosen._replace(rows=32)
        yield "keys first", chosen._replace(is_turned=True)
    else:
        yield "a quarter of the units", chosen._replace(min_units=chosen.min_units // 4)


def batch_for(executable: CudaExecutable, number: int, before: int, rows: int) -> RaggedBatch:
    if rows == 1:
        return decoding(executable, number, before)
    sequences = sequences_of(number, before + rows)
    for sequence in sequences:
        sequence.computed = before
    tokens = [[7 + i % 30 for i in range(rows)] for _ in sequences]
    return step_of(executable, sequences, tokens, all_logits=False)


def try_tiles(kind: KvDtype, step: tuple[int, int, int], smoke: bool) -> dict[str, float]:
    """Seconds of a layer's attention with each tile that fits."""
    spec = replace(SPECS["tiny" if smoke else "8b"], vocab_size=4096)
    spec = spec.with_layers(range(min(LAYERS, spec.num_layers)))
    usual, took, names, number = tiles_for, dict[str, float](), ["chosen"], 0
    slots = step[0] * (step[1] + step[2] + programs.BLOCK_SIZE)

    def one_of_them(*args: Any) -> Tiles:
        found = dict(others(usual(*args)))
        names[1:] = list(found)[1:]
        return found[names[number]]

    with patch.object(step_attention, "tiles_for", one_of_them):
        while number < len(names):
            executable = executable_of(spec, "Q4_0", kind, slots=slots)
            try:
                plan = plan_of(executable, batch_for(executable, *step), captured=False)
                launches = [one for one in plan.launches if one.name.startswith("attention")]
                run = executable._stream.capture(launches)
                times = seconds(run, 1 if smoke else 7, 5)
                took[names[number]] = median(times) / spec.num_layers
            except Exception as error:
                print(f"  {names[number]}: {type(error).__name__}", flush=True)
            programs.forget()
            number += 1
    return took


def main() -> None:
    """Time attention with each tile."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kv", nargs="+", choices=KINDS, default=KINDS, help="KV dtypes")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="steps")
    parser.add_argument("--out", type=Path, help="file for the results")
    parser.add_argument(
        "--smoke", action="store_true", help="sizes that are small enough for the interpreter"
    )
    args = parser.parse_args()
    results, found = Results(args.out), []
    steps = {"small": (2, 70, 1)} if args.smoke else {name: STEPS[name] for name in args.steps}
    for kind in args.kv:
        for name, step in steps.items():
            took = try_tiles(kind, step, args.smoke)
            found.append({"kv": kind, "step": name, "seconds": took})
            print(f"{kind} {name}:", *(f"{n} {1e6 * t:.1f} us," for n, t in took.items()))
            results.write("attention tiles", found)


if __name__ == "__main__":
    main()
