"""How fast a model decodes in each format of weights, in turns, and how close that is to what the
bytes allow.

    python benchmarks/formats.py shaped-1b-Q4_0.gguf int8-g128,int4-g128,int3-g128,int2-g128,nf4-g64 --rounds 5

The matrices of the model are filled with random codes, whose values make no difference to how long
a product takes. Embeddings and logits stay as the file has them. A format whose tokens/s times
bytes is that of another uses the memory as well as that.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headrace.batch import RaggedBatch
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.convert.matrices import quantisable, quantised_matrix
from headrace.convert.quality import Scorer
from headrace.convert.sequence_batch import sequence_batch
from headrace.planner.host import usable_cores
from headrace.quant.format_names import named_format
from headrace.quant.formats import StoredTensor
from headrace.quant.spec import TableRows, encode_numbers

DEPTH, STEPS = 64, 16
"""Tokens before the ones that are decoded, and how many of these make a turn."""


def filled(tensor: StoredTensor, name: str) -> StoredTensor:
    """A matrix of random codes in a format."""
    rng, rows, cols, to = np.random.default_rng(0), tensor.rows, tensor.cols, named_format(name)
    codes = rng.integers(0, 256, (rows, cols), np.uint8)
    if to.codebook in ("e4m3", "e5m2"):
        codes &= 0xBF  # all of them finite
    scales = encode_numbers(np.full((rows, to.num_scales(cols)), 1e-3, np.float32), to.scale)
    zeros = np.full(scales.shape, 1 << to.bits - 1, np.uint8) if to.zero_type else None
    return quantised_matrix(
        tensor, to, [TableRows(codes & np.uint8((1 << to.bits) - 1), scales, zeros)]
    )


def in_format(checkpoint: Checkpoint, name: str) -> Mapping[str, StoredTensor]:
    """The tensors of the model, its matrices in a format; those of one shape are one. `file`: as
    they are.
    """
    tensors = dict(checkpoint.tensors)
    if name == "file":
        return tensors
    made: dict[tuple[int, int], StoredTensor] = {}
    for matrix in quantisable(checkpoint.spec, tensors):
        shape = tensors[matrix].rows, tensors[matrix].cols
        made[shape] = made.get(shape) or filled(tensors[matrix], name)
        tensors[matrix] = replace(made[shape], name=matrix)
    return tensors


def turn(scorer: Scorer, batch: RaggedBatch) -> float:
    """Tokens/s of some steps."""
    begun = time.perf_counter()
    for _ in range(STEPS):
        scorer.executable.launch(batch).wait()
    return STEPS / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="what `headrace pull` takes")
    parser.add_argument(
        "formats",
        help="names with commas between them, such as int4-g128; `file` is what the model has",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--activations", choices=("int8", "f32"), default="int8")
    args = parser.parse_args()
    checkpoint = open_checkpoint(resolve(args.model))
    scorers = {
        name: Scorer(
            checkpoint.spec,
            in_format(checkpoint, name),
            DEPTH + 1,
            "cpu",
            args.threads,
            activations=args.activations,
        )
        for name in args.formats.split(",")
    }
    groups = {name: len(scorer.executable.program.kv_groups) for name, scorer in scorers.items()}
    prompt = list(range(DEPTH + 1))
    speeds: dict[str, list[float]] = {name: [] for name in scorers}
    for name, scorer in scorers.items():  # the keys and values that the steps read
        scorer.executable.launch(sequence_batch(prompt, 0, DEPTH, 1, 5, groups[name])).wait()
    for _ in range(args.rounds):
        for name, scorer in scorers.items():
            speeds[name].append(
                turn(scorer, sequence_batch(prompt, DEPTH, DEPTH + 1, 1, 5, groups[name]))
            )
    paces = {
        name: statistics.median(speeds[name]) * scorer.executable.program.weight_bytes
        for name, scorer in scorers.items()
    }
    print(
        f"{'format':14} {'MB':>7} {'tokens/s':>9}  {'min-max':13} {'GB/s':>6} {'of the best':>11}"
    )
    for name, scorer in scorers.items():
        of, spread = speeds[name], f"({min(speeds[name]):.1f}-{max(speeds[name]):.1f})"
        figures = (
            f"{scorer.executable.program.weight_bytes / 1e6:7,.0f} "
            f"{statistics.median(of):9.1f}  {spread:13}"
        )
        print(
            f"{name:14} {figures} {paces[name] / 1e9:6.1f} "
            f"{paces[name] / max(paces.values()):11.2f}"
        )


if __name__ == "__main__":
    main()
