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
from headrace.backend.variants import GatheredRows, result_of, run_parts
from headrace.batch import Ints, RaggedBatch, StepTimes
from headrace.config import Activations, KvConfig
from headrace.logit_ops import Done, LogitOp, LogitOpResult
from headrace.program import moe
from headrace.program.adapter import (
    Adapter,
    LowRank,
    low_rank_part,
    own_name,
    own_weights,
    with_own_weights,
)
from headrace.program.op import Value
from headrace.program.sparsity import dense
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.sampling.host import run_logit_ops, tokens_of

Floats = NDArray[np.float64]
_FLOAT64_BYTES = 8


def lower(program: Program, weights: Mapping[str, StoredTensor]) -> Program:
    return dense(program).with_weights(
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
        self._traced, self._stored = program, weights
        self.program = lower(program, weights)
        self.kv = kv
        self.key_rounding = {rounding.layer: rounding for rounding in kv.key_rounding}
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
        self.adapters: dict[int, Mapping[str, LowRank]] = {}
        self._variants: dict[int, ReferenceExecutable] = {}
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
        batch = batch._replace(tokens=tokens_of(batch, self._results))
        if self._variants and batch.adapters is not None:
            rows = run_parts(batch, self._variants, self._run_part)
        else:
            rows = self._run_part(None, batch)
        assert rows.logits is not None
        self._results = run_logit_ops(ops, rows.logits, rows.pooled)
        return Done(result_of(self._results, rows, logits=logits, hidden=hidden))

    def _run_part(self, variant: "ReferenceExecutable | None", batch: RaggedBatch) -> GatheredRows:
        memory = variant or self
        program, step = memory.program, Step(memory, batch)
        for op in program.ops:
            step.run(op)

        def rows_of(value: Value | None) -> NDArray[np.float32] | None:
            return step.x(value).astype(np.float32) if value else None

        assert program.logits, "a stage without logits runs next to the last stage"
        return GatheredRows(
            rows_of(program.logits),
            rows_of(program.hidden),
            rows_of(program.pooled),
            rows_of(program.taps),
        )

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> "ReferenceExecutable":
        if kv is not None:
            return ReferenceExecutable(program, weights, kv)
        attached = copy(self)
        attached._traced, attached._stored, attached._variants = program, weights, {}
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
        self.adapters[number] = low_rank_part(adapter)
        if len(self.adapters[number]) != len(adapter):
            self._variants[number] = self._variant(adapter)
        return number

    def _variant(self, adapter: Adapter) -> "ReferenceExecutable":
        """The program with the adapter's own weights, over the same KV and adapters."""
        own = own_weights(self._traced, adapter, self._stored)
        named = {own_name(name): tensor for name, tensor in own.items()}
        variant, program = copy(self), with_own_weights(self._traced, own)
        variant.program = lower(program, named)
        variant.weights = _dequantise(program, named, known=self.weights)
        return variant

    def remove_adapter(self, number: int) -> None:
        del self.adapters[number]
        self._variants.pop(number, None)

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
        self._stored = {}  # its tensors keep the model's files open
        self._variants.clear()
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
