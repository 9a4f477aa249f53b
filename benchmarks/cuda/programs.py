"""Programs with the sizes of well-known models and random weights, and their steps."""

import gc
import os
import sys
from pathlib import Path

sys.path.append(
    str(Path(__file__).resolve().parents[2])
)  # tests/ lends its models without numbers and its batches
if "--smoke" in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch

from headrace import _native
from headrace.backend.cuda.compile_kernels import compile_kernels
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.executable import CudaExecutable, Plan
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.step_shape import StepShape, shape_of
from headrace.backend.cuda.stream import make_stream
from headrace.backend_traits import KvDtype
from headrace.batch import RaggedBatch
from headrace.config import KvConfig
from headrace.logit_ops import SampleOp
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.program import ops
from tests.backend.batches import Sequence, batch_of
from tests.backend.cuda.hollow import hollow_tensors, make_weights_in_place

BLOCK_SIZE = 64


def executable_of(
    spec: ModelSpec, format: str, kv: KvDtype = "bf16", *, slots: int, experts: str = ""
) -> CudaExecutable:
    """A model with random weights, and KV for a number of tokens."""
    make_weights_in_place(DEVICE)
    tensors = hollow_tensors(spec, format, experts)
    program = trace_model(spec, tensors)
    blocks = (-(-slots // BLOCK_SIZE) + 1,) * len(program.kv_groups)
    return CudaExecutable(
        program, tensors, KvConfig(blocks, BLOCK_SIZE, kv), torch.bfloat16, make_stream()
    )


def weight_bytes(executable: CudaExecutable) -> int:
    """Bytes of weights that a step with one row reads, including one row of embeddings."""
    read = {
        w.name: w.nbytes
        for op in executable.program.ops
        if not isinstance(op, ops.Embed)
        for w in op.matrices()
    }
    return sum(read.values())


def sequences_of(number: int, slots: int) -> list[Sequence]:
    """Sequences with slots for a number of tokens each, in shuffled blocks."""
    each = -(-slots // BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(number * each)
    return [
        Sequence([int(block) for block in part], BLOCK_SIZE)
        for part in np.array_split(order, number)
    ]


def step_of(
    executable: CudaExecutable,
    sequences: list[Sequence],
    tokens: list[list[int]],
    *,
    all_logits: bool = True,
) -> RaggedBatch:
    """A step without drafts, with logits of all rows, or of the last row of each sequence."""
    batch = batch_of(
        sequences, tokens, [([], [])] * len(sequences), False, len(executable.kv_groups)
    )
    if all_logits:
        return batch
    last = (batch.row_start[1:] - 1).astype(np.int32)
    return batch._replace(logit_rows=last, seq_of=np.arange(len(last), dtype=np.int32))


def decoding(executable: CudaExecutable, number: int, context: int) -> RaggedBatch:
    """A step of plain decoding."""
    sequences = sequences_of(number, context + 1)
    for sequence in sequences:
        sequence.computed = context
    return step_of(executable, sequences, [[7 + i] for i in range(number)])


def draws(batch: RaggedBatch, vocab: int, **params: float) -> list[SampleOp]:
    return [
        SampleOp(
            row,
            int(position) + 1,
            _native.Sampler(vocab, [1, 2], seed=row, **(params or {"temperature": 0.0})),
        )
        for row, position in enumerate(batch.positions)
    ]


def plan_of(executable: CudaExecutable, batch: RaggedBatch, captured: bool = True) -> Plan:
    """The plan of a step, optionally as a graph, with its inputs on the device."""
    shape: StepShape = shape_of(batch)
    compile_kernels(executable._plan(shape).launches)
    if captured:
        executable._captured.add(shape)
        executable._capture(executable._plan(shape))
    executable.launch(batch).wait()
    return executable._plan(shape)


def forget() -> None:
    """Return unused memory to the device."""
    gc.collect()
    if not is_interpreting():
        torch.cuda.empty_cache()
