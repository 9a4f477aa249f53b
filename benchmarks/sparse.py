"""Speed of 2:4 weights next to the same weights with their zeros, and next to their bytes.

    python benchmarks/sparse.py int8 --rounds 7
    python benchmarks/sparse.py int4 bf16 --batches 1 8 --prompts 512

Both models have the sizes of Llama-3.2-1B, a vocabulary of 16,384, random weights and all matrices
in one format. They take turns, and ratios are formed within a turn. `bytes` is the ratio of the
bytes of a step, dense to sparse; `of bytes` is the part of it that the time shows. Needs no file.
"""

import argparse
import statistics
from typing import Any

from headrace.config import EngineConfig
from headrace.measure.phase_timer import PhaseTimer, step_blocks, step_phase
from headrace.measure.random_model import random_checkpoint
from headrace.measure.table import print_table
from headrace.program.op import StepSize
from headrace.quant.formats import FORMATS, Format, plain_table
from headrace.quant.spec import QuantSpec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16384,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
INT4 = QuantSpec(bits=4, group=128)
FORMATS_OF: dict[str, tuple[Format, Format]] = {
    "int8": (
        FORMATS["I8_ROW"],
        plain_table(QuantSpec(bits=8, group=0, scale="f32", is_sparse=True)),
    ),
    "int4": (plain_table(INT4), plain_table(QuantSpec(bits=4, group=128, is_sparse=True))),
    "bf16": (
        FORMATS["BF16"],
        plain_table(QuantSpec(bits=16, group=0, scale="none", codebook="bf16", is_sparse=True)),
    ),
}
"""The dense and the sparse format of each type of values."""
DEPTH = 24
"""Tokens in the cache of each sequence that decodes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("values", nargs="*", default=["int8"], choices=FORMATS_OF)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--prompts", nargs="*", type=int, default=[512])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    for values in args.values:
        steps = [StepSize(((DEPTH, 1),) * batch, batch, 2.0) for batch in args.batches]
        steps += [StepSize(((0, length),), 1, 2.0) for length in args.prompts]
        compare(values, steps, args.rounds, args.threads)


def compare(values: str, steps: list[StepSize], rounds: int, threads: int) -> None:
    """Print a table: a step of each size, dense and sparse in turns."""
    config = EngineConfig(backend="cpu", threads=threads)
    blocks = max(step_blocks(step, config.traits.kv_block_size) for step in steps)
    timers = [
        PhaseTimer(values, random_checkpoint(values, CONFIG, form), config, blocks)
        for form in FORMATS_OF[values]
    ]
    try:
        times: dict[tuple[int, int], list[float]] = {}
        for _ in range(rounds):
            for number, step in enumerate(steps):
                for which, timer in enumerate(timers):
                    found = timer.time_phase(step_phase(step), 0.15)
                    wall = statistics.median(each.wall for (each,) in found)
                    times.setdefault((number, which), []).append(wall)
        rows = [
            row(step, times[number, 0], times[number, 1], timers)
            for number, step in enumerate(steps)
        ]
    finally:
        for timer in timers:
            timer.close()
    headings = ["step", ">dense ms", ">2:4 ms", ">ratio (min-max)", ">bytes", ">of bytes"]
    print_table(headings, rows, title=f"{values}: dense and 2:4, median of {rounds} turns")


def row(
    step: StepSize, dense: list[float], sparse: list[float], timers: list[PhaseTimer]
) -> list[str]:
    first, second = (sum(op.bytes(step) for op in timer.executable.program.ops) for timer in timers)
    ratios = [a / b for a, b in zip(dense, sparse, strict=True)]
    ratio, by_bytes = statistics.median(ratios), first / second
    batch = len(step.seqs)
    return [
        f"decode, batch {batch}" if step.rows == batch else f"prompt of {step.rows}",
        f"{statistics.median(dense) * 1e3:.2f}",
        f"{statistics.median(sparse) * 1e3:.2f}",
        f"{ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        f"{by_bytes:.2f}",
        f"{ratio / by_bytes:.2f}",
    ]


if __name__ == "__main__":
    main()
