"""Host time of decode launches with 64 sequences and a device that does nothing: `python
benchmarks/cuda/host.py`.

It measures the first launch of a step, and later launches of multi-step decoding.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from headrace._native import Sampler
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.stream import HostStream
from headrace.batch import KvRows, RaggedBatch, ints
from headrace.config import KvConfig
from headrace.logit_ops import SampleOp, ShiftedSampleOps
from headrace.model import trace_model
from tests.tiny import tiny_model

SEQS, STEPS, BLOCK, IN_A_ROW = 64, 400, 64, 8


class NoDevice(HostStream):
    """Copies arrays, but launches no kernel."""

    def run(self, launches: object) -> None:
        """Does nothing."""


def main() -> None:
    spec, tensors = tiny_model(0)
    executable = CudaExecutable(
        trace_model(spec, tensors),
        tensors,
        KvConfig((16 * SEQS,), BLOCK, "bf16"),
        torch.bfloat16,
        NoDevice(),
    )
    table, rows = np.arange(16 * SEQS, dtype=np.int32).reshape(SEQS, 16), ints(list(range(SEQS)))
    samplers = [
        Sampler(spec.vocab_size, [1], seed=i, temperature=0.7, top_p=0.9) for i in range(SEQS)
    ]
    ones, starts, first = ints([1] * SEQS), ints(list(range(SEQS + 1))), list[SampleOp]()
    seconds: dict[str, list[float]] = {
        "first_launch_us": [],
        "further_launch_us": [],
        "read_us": [],
    }
    for step in range(STEPS):
        at = ints([step] * SEQS)
        slots = table[:, step // BLOCK] * BLOCK + step % BLOCK
        batch = RaggedBatch(
            ones, at, starts, at, ones, (KvRows(slots, table),), None, rows, rows, rows
        )
        later = step % IN_A_ROW
        first = (
            first
            if later
            else [SampleOp(i, step + 1, sampler) for i, sampler in enumerate(samplers)]
        )
        begun = time.perf_counter()
        ticket = executable.launch(batch, ShiftedSampleOps(first, later) if later else first)
        launched = time.perf_counter()
        ticket.wait()
        seconds["further_launch_us" if later else "first_launch_us"].append(launched - begun)
        seconds["read_us"].append(time.perf_counter() - launched)
    print(json.dumps({name: round(1e6 * median(times)) for name, times in seconds.items()}))


if __name__ == "__main__":
    main()
