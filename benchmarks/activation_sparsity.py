"""Times decode steps of a ReLU model that skips zeros, next to the dense model.

    python benchmarks/shaped.py 1b Q4_0 --out .bench/models
    python benchmarks/activation_sparsity.py .bench/models/shaped-1b-Q4_0.gguf --zeros 0.9

The model is the file's with a ReLU gate, whose bias makes the share of zeros. Dense and sparse
steps take turns, at each batch size; the rows have different tokens. All logits are compared.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from headrace.backend import compile_program, lower_program
from headrace.checkpoint.load import open_checkpoint
from headrace.config import KvConfig
from headrace.kv.blocks import Table
from headrace.kv.rows import TokenRun, batch_of_runs
from headrace.model import trace_model
from headrace.program.op import StepSize
from headrace.program.sparsity import with_skipped_zeros
from headrace.quant.formats import StoredTensor


def relu_model(path: str, zeros: float) -> tuple[Any, dict[str, StoredTensor]]:
    """The specification and tensors of the file's model, with biased ReLU gates."""
    checkpoint = open_checkpoint(Path(path))
    spec = replace(checkpoint.spec, activation="relu", mlp_bias=True)
    tensors = dict(checkpoint.tensors)
    for layer in range(spec.num_layers):
        rows = tensors[f"layers.{layer}.gate"].dequantise_rows(np.arange(64))
        deviation = float(np.sqrt((rows**2).sum(axis=1).mean()))
        bias = NormalDist().inv_cdf(1 - zeros) * deviation
        for part, size in (("gate", spec.ffn_dim), ("up", spec.ffn_dim), ("down", spec.dim)):
            name = f"layers.{layer}.{part}_bias"
            values = np.full(size, bias if part == "gate" else 0, np.float32)
            tensors[name] = StoredTensor.from_floats(name, values)
    return spec, tensors


def timed(executables: list[Any], batch: Any, rounds: int) -> Iterator[list[float]]:
    """Seconds of a step of each executable, in turns."""
    for _ in range(rounds):
        times = []
        for executable in executables:
            start = time.perf_counter()
            executable.launch(batch, logits=True).wait()
            times.append(time.perf_counter() - start)
        yield times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--zeros", type=float, default=0.9)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    spec, tensors = relu_model(args.model, args.zeros)
    dense = trace_model(spec, tensors)
    programs = [dense, with_skipped_zeros(dense)]
    most = max(args.batches)
    executables = [
        compile_program("cpu", program, tensors, KvConfig((most,), 32), args.threads)
        for program in programs
    ]
    size = StepSize(((0, 1),), 1, 2)
    costs = [
        sum(op.bytes(size) for op in lower_program("cpu", program, tensors).ops)
        for program in programs
    ]
    print(f"predicted by bytes at batch 1: {costs[0] / costs[1]:.2f}")
    rng = np.random.default_rng(0)
    for rows in args.batches:
        tokens = rng.integers(0, spec.vocab_size, rows).tolist()
        runs = [TokenRun([token], 0, (Table([i]),)) for i, token in enumerate(tokens)]
        batch = batch_of_runs(runs, 32, logits=True)
        first = [each.launch(batch, logits=True).wait().logits.copy() for each in executables]
        same = "same bits" if np.array_equal(*first) else "OTHER BITS"
        times = list(timed(executables, batch, args.rounds))
        ratio = statistics.median(plain / skipped for plain, skipped in times)
        plain, skipped = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        figures = f"dense {plain:.1f} ms, sparse {skipped:.1f} ms, ratio {ratio:.2f}, {same}"
        print(f"batch {rows}: {figures}")


if __name__ == "__main__":
    main()
