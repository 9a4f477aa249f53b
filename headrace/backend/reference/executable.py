"""The executable of the reference backend."""

import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import count
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from headrace.backend import HostBlocks, expert_table, host_block_counts
from headrace.backend.reference.kv import ReferenceHostBlocks, Store
from headrace.backend.reference.ops import Step
from headrace.batch import Ints, RaggedBatch, StepTimes
from headrace.config import Activations, KvConfig
from headrace.logit_ops import Done, LogitOp, LogitOpResult, StepResult
from headrace.program import moe
from headrace.program.adapter import Adapter
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.sampling.host import run_logit_ops, tokens_of

Floats = NDArray[np.float64]
_FLOAT64_BYTES = 8


def lower(program: Program, weights: Mapping[str, StoredTensor]) -> Program:
    return program.with_weights(
        {
            weight.name: replace(
                weight, nbytes=_FLOAT64_BYTES * weight.rows * weight.cols, kind="f32"
            )
            for weight in program.weights.values()
        }
    )


def compile(
    program: Program,
    weights: Mapping[str, StoredTensor],
    kv: KvConfig,
    threads: int,
    activations: Activations = "f32",
) -> "ReferenceExecutable":
    """Compile for NumPy, with its threads and float64 activations."""
    return ReferenceExecutable(program, weights, kv)


class ReferenceExecutable:
    """A program, its weights in float64 and its KV."""

    max_in_flight = 1

    def __init__(self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig) -> None:
        self.program = lower(program, weights)
        self.kv = kv
        self.weights = _dequantise(program, weights)
        self.kv_groups = program.kv_groups
        self.stores = [
            Store(group, num_blocks * kv.block_size)
            for group, num_blocks in zip(self.kv_groups, kv.num_blocks, strict=True)
        ]
        self.places = {
            layer: (number, i)
            for number, group in enumerate(self.kv_groups)
            for i, layer in enumerate(group.layers)
        }
        self.adapters: dict[int, Adapter] = {}
        self.expert_rows = _zero_expert_rows(self.program)
        self._results: list[LogitOpResult] = []  # of the last launch

    def prepare(self, max_rows: int, max_logit_rows: int) -> None:
        pass

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> Done:
        program = self.program
        step = Step(self, batch._replace(tokens=tokens_of(batch, self._results)))
        for op in program.ops:
            step.run(op)

        assert program.logits, "a stage without logits runs next to the last stage"
        logit_rows = step.x(program.logits).astype(np.float32)
        pooled_rows = step.x(program.pooled).astype(np.float32) if program.pooled else None
        self._results = run_logit_ops(ops, logit_rows, pooled_rows)
        hidden_rows = None
        if hidden and program.hidden:
            hidden_rows = step.x(program.hidden).astype(np.float32)
        return Done(StepResult(self._results, logit_rows if logits else None, hidden_rows))

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> "ReferenceExecutable":
        if kv is not None:
            return ReferenceExecutable(program, weights, kv)
        attached = copy(self)
        attached.program = lower(program, weights)
        attached.weights = _dequantise(program, weights, known=self.weights)
        attached.expert_rows = _zero_expert_rows(attached.program)
        return attached

    def profile(self, batch: RaggedBatch) -> StepTimes:
        start = time.perf_counter()
        step = Step(self, batch)
        seconds = dict.fromkeys((op.name for op in self.program.ops), 0.0)
        for op in self.program.ops:
            op_start = time.perf_counter()
            step.run(op)
            seconds[op.name] += time.perf_counter() - op_start
        return StepTimes(time.perf_counter() - start, seconds, 0)

    def expert_loads(self) -> NDArray[np.int64]:
        return expert_table([rows.tolist() for rows in self.expert_rows.values()])

    def add_adapter(self, adapter: Adapter) -> int:
        number = next(number for number in count() if number not in self.adapters)
        self.adapters[number] = adapter
        return number

    def remove_adapter(self, number: int) -> None:
        del self.adapters[number]

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        store = self.stores[group]
        for cache in (store.keys, store.values):
            for source_slot, target_slot in zip(source, target, strict=True):
                cache[:, target_slot] = cache[:, source_slot]

    def host_blocks(self, num_bytes: int) -> HostBlocks | None:
        block_size = self.kv.block_size
        block_bytes = [store.block_bytes(block_size) for store in self.stores]
        counts = host_block_counts(
            num_bytes, list(zip(self.kv.num_blocks, block_bytes, strict=True))
        )
        return ReferenceHostBlocks(self.stores, counts, block_size) if all(counts) else None

    def close(self) -> None:
        self.weights.clear()
        self.stores.clear()


def _zero_expert_rows(program: Program) -> dict[int, NDArray[np.int64]]:
    return {
        op.out.id: np.zeros(len(op.gate), np.int64)
        for op in program.ops
        if isinstance(op, moe.Experts)
    }


def _dequantise(
    program: Program,
    weights: Mapping[str, StoredTensor],
    known: Mapping[str, Floats] = MappingProxyType({}),
) -> dict[str, Floats]:
    return {
        name: known[name] if name in known else weights[name].dequantise().astype(np.float64)
        for name in program.weights
    }
