"""What the host takes for a step of 64 sequences that decode, with a device that does nothing: `python benchmarks/cuda/host.py`."""

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
from headrace.logit_ops import Draw
from headrace.model import trace_model
from tests.tiny import tiny_model

SEQS, STEPS, BLOCK = 64, 400, 64


class NoDevice(HostStream):
    """Copies, and launches nothing."""

    def run(self, launches: object) -> None:
        """Nothing."""


def main() -> None:
    spec, tensors = tiny_model(0)
    executable = CudaExecutable(trace_model(spec, tensors), tensors, KvConfig((16 * SEQS,), BLOCK, "bf16"), torch.bfloat16, NoDevice())
    table, rows = np.arange(16 * SEQS, dtype=np.int32).reshape(SEQS, 16), ints(list(range(SEQS)))
    samplers = [Sampler(spec.vocab_size, [1], seed=i, temperature=0.7, top_p=0.9) for i in range(SEQS)]
    ones, starts, launches, reads = ints([1] * SEQS), ints(list(range(SEQS + 1))), [], []
    for step in range(STEPS):
        at = ints([step] * SEQS)
        slots = table[:, step // BLOCK] * BLOCK + step % BLOCK
        batch = RaggedBatch(ones, at, starts, at, ones, (KvRows(slots, table),), None, rows, rows, rows)
        ops = [Draw(i, step + 1, sampler) for i, sampler in enumerate(samplers)]
        begun = time.perf_counter()
        ticket = executable.launch(batch, ops)
        launched = time.perf_counter()
        ticket.wait()
        launches.append(launched - begun)
        reads.append(time.perf_counter() - launched)
    print(json.dumps({"launch_us": round(1e6 * median(launches)), "read_us": round(1e6 * median(reads))}))


if __name__ == "__main__":
    main()
