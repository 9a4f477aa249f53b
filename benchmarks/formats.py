"""Decode speed of a model in each weight format, in turns, compared with its bytes.

    python benchmarks/formats.py shaped-1b-Q4_0.gguf int8-g128,int4-g128,nf4-g64 --rounds 5

Matrices have random codes, because values do not change the time of a product. Embeddings and the
head keep the file's format. Two formats with the same tokens/s times bytes use the memory equally
well.
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
from headrace.model import trace_model
from headrace.planner.host import usable_cores
from headrace.quant.format_names import named_format
from headrace.quant.formats import StoredTensor
from headrace.quant.spec import TableRows, encode_numbers

DEPTH, STEPS = 64, 16
"""Tokens before the decoded tokens, and decoded tokens per turn."""


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
    """The tensors of the model, with matrices of a shape shared. `file`: unchanged formats."""
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
    begun = time.perf_counter()
    for _ in range(STEPS):
        scorer.executable.launch(batch).wait()
    return STEPS / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model, as for `headrace pull`")
    parser.add_argument(
        "formats",
        help="comma-separated formats, for example int4-g128; `file` keeps the file's formats",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--activations", choices=("int8", "f32"), default="int8")
    args = parser.parse_args()
    checkpoint = open_checkpoint(resolve(args.model))
    formats = {name: in_format(checkpoint, name) for name in args.formats.split(",")}
    scorers = {
        name: Scorer(
            trace_model(checkpoint.spec, tensors),
            tensors,
            DEPTH + 1,
            "cpu",
            args.threads,
            activations=args.activations,
        )
        for name, tensors in formats.items()
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
