"""A program on a GPU: its weights, its KV, and the launches of steps, made once per step
shape.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backend import HostBlocks, host_block_counts
from headrace.backend.cuda.adapters import Adapters
from headrace.backend.cuda.compile_kernels import compile_kernels, with_progress
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.draft_vocabulary import DraftVocabulary
from headrace.backend.cuda.drafter import CudaDrafter
from headrace.backend.cuda.exchange import Exchange, Transport
from headrace.backend.cuda.expert_loads import ExpertLoads
from headrace.backend.cuda.host_blocks import CudaHostBlocks
from headrace.backend.cuda.kept_rows import KeptStep, RowStore
from headrace.backend.cuda.kv_store import KvStore
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.lower import lower
from headrace.backend.cuda.lowering import Lowering
from headrace.backend.cuda.memory import device_errors
from headrace.backend.cuda.sampling import AnyStep, DeviceSampler
from headrace.backend.cuda.sampling_layout import SampleLayout, common_layouts
from headrace.backend.cuda.step_input import StepInput, max_ints
from headrace.backend.cuda.step_shape import (
    StepShape,
    decoding,
    graph_rows,
    prefill,
    shape_of,
    shape_rows,
)
from headrace.backend.cuda.stream import Stream
from headrace.backend.cuda.ticket import CudaTicket, HostArray, Slot, Slots
from headrace.backend.cuda.weights import Weights, read_wide
from headrace.backend.cuda.workspace import Buffers, Workspace
from headrace.backend.variants import sequences_of
from headrace.backend_traits import BACKENDS
from headrace.batch import Ints, RaggedBatch, StepTimes, part_of
from headrace.config import KvConfig
from headrace.logit_ops import LogitOp, LogitOpResult, Pool, StepResult
from headrace.program import moe, ops
from headrace.program.adapter import (
    Adapter,
    LowRank,
    low_rank_part,
    own_name,
    own_weights,
    with_own_weights,
)
from headrace.program.op import Value
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.sampling import host as host_sampling

# Steps of a shape before its launches become a graph: launching the kernels of a small
# model one by one takes longer than a prompt chunk runs.
_RUNS_BEFORE_GRAPH = 8
_MAX_LATE_GRAPHS = 64  # Each takes one or two megabytes
# Room for the tables of 64 sequences with 16,000 blocks each, so the array rarely
# grows.
_MIN_INTS = 1 << 20
_POOLED, _TAPS = 2, 3  # Indices of pooled rows and taps among the results of a program

DeviceInput = Callable[[torch.Tensor, Slot], None]
"""Writes the input rows of a step to a tensor [padded rows, width], in the stream."""


@dataclass
class SampleLaunches:
    """Sampling launches of one layout."""

    launches: list[Launch]
    results: torch.Tensor
    graph: Callable[[], None] | None = None
    has_run: bool = False


@dataclass
class Plan:
    """Launches for all steps of one shape."""

    step: StepInput
    launches: list[Launch]
    names: list[str]  # The op of each launch
    value: Callable[[Value], torch.Tensor]
    sampling: dict[SampleLayout, SampleLaunches]
    # Runs all launches at once; None: they run one by one
    graph: Callable[[], None] | None = None
    num_runs: int = 0


class CudaExecutable:
    """Launches steps of a program in one stream, ahead of their results."""

    max_in_flight = BACKENDS["cuda"].max_in_flight

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, StoredTensor],
        kv: KvConfig,
        activations: torch.dtype,
        stream: Stream,
        workspace: Workspace | None = None,
        transport: Transport | None = None,
    ) -> None:
        """`transport`: exchanges of one of several ranks."""
        self.kv_groups = program.kv_groups
        self._stores = [
            KvStore(group, num_blocks, kv.block_size, kv.dtype)
            for group, num_blocks in zip(self.kv_groups, kv.num_blocks, strict=True)
        ]
        self._weights = Weights(tensors)
        self._workspace = workspace or Workspace()
        self._adapters = Adapters()
        self._packed, self._stream, self._transport = activations, stream, transport
        # Rows and logit rows of the largest step, once it is known
        self._max_rows: tuple[int, int] | None = None
        self._set_program(program)
        self._plan(decoding(1))  # packs the weights

    def _set_program(self, traced: Program) -> None:
        """Set the state that attached executables do not share."""
        program = lower(traced, self._weights.tensors)
        self._traced = traced
        self._variants: dict[int, CudaExecutable] = {}
        self.program, self._logits = program, program.logits
        self._buffers = Buffers(program, self._packed, read_wide(program, self._weights.tensors))
        # A stage without logits samples nothing.
        self._sampler = DeviceSampler(program.logits.width if program.logits else 1, DEVICE)
        self._input = next((op.out for op in program.ops if isinstance(op, ops.Input)), None)
        self._ints = torch.zeros(0, dtype=torch.int32, device=DEVICE)
        self._plans: dict[StepShape, Plan] = {}
        # Shapes whose plans get a graph as soon as they are made
        self._captured: set[StepShape] = set()
        self._num_late_graphs = 0
        # Versions of the memory that plans are bound to: growth of the workspace,
        # changes of adapters
        self._bound = (0, 0)
        self._in_flight: deque[CudaTicket] = deque()
        self._num_launches = 0
        self._slots = Slots(self._in_flight)
        experts = [op for op in program.ops if isinstance(op, moe.Experts)]
        self._loads = ExpertLoads(experts, self._stream)
        # Where the taps of steps stay for a drafter; None: they are copied to the host
        self._tap_store: RowStore | None = None
        self._vocabulary: DraftVocabulary | None = None

    @device_errors
    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> "CudaExecutable":
        if kv is not None:
            return CudaExecutable(program, weights, kv, self._packed, self._stream, self._workspace)
        other = copy(self)
        other._weights.add(weights)
        other._set_program(program)
        return other

    @device_errors
    def attach_drafter(
        self,
        from_target: "CudaExecutable",
        from_itself: "CudaExecutable",
        tokens: NDArray[np.int32] | None,
        vocab_size: int,
    ) -> CudaDrafter:
        """See `DrafterHost.attach_drafter`."""
        assert self.program.taps, "a drafter reads taps"
        self._tap_store = RowStore(self.program.taps.width, self._stream, self._workspace)
        from_target._vocabulary = None if tokens is None else DraftVocabulary(tokens, vocab_size)
        from_target._sampler = DeviceSampler(vocab_size, DEVICE)
        from_target._plans.clear()  # they are bound to the old sampler
        for name in ("_vocabulary", "_sampler", "_in_flight", "_slots"):
            setattr(from_itself, name, getattr(from_target, name))
        return CudaDrafter(from_target, from_itself, self._tap_store)

    @device_errors
    def hidden_rows(self, batch: RaggedBatch) -> torch.Tensor:
        """The hidden rows [logit rows, width] of the launch of `batch`, which is the last one."""
        assert self.program.hidden
        return self._plan(shape_of(batch)).value(self.program.hidden)

    @device_errors
    def copy_rows(self, to: torch.Tensor, source: torch.Tensor, rows: Sequence[int]) -> None:
        """Copy rows of `source` to the first rows of `to`, in the stream."""
        for first, last in _runs(np.array(rows, np.int32)):
            self._stream.copy(to[first:last], source[rows[first] : rows[last - 1] + 1])

    @device_errors
    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
        inputs: DeviceInput | None = None,
    ) -> CudaTicket:
        """See `Executable.launch`. `inputs` takes the place of the batch's input rows."""
        # A launch whose tokens the host samples in the last launch waits for them.
        last = self._in_flight[-1] if self._in_flight else None
        needs_host = batch.token_source is not None and last is not None and last.samples_on_host
        repeated = self._sampler.repeat(ops)
        if last and (needs_host or (not repeated and self._sampler.must_wait(ops))):
            last.wait()
        self._stream.catch_up()
        self._num_launches += 1

        sampling = repeated or self._sampler.begin(ops, with_chains=inputs is not None)
        slot = None
        try:
            slot = self._slots.next()
            plan = self._run_programs(batch, sampling, slot, inputs)
            sampled = self._run_sampling(plan, sampling.layout)
            return self._receive(plan, batch, sampling, ops, sampled, slot, logits, hidden)
        except BaseException:
            sampling.cancel()
            if slot:
                self._slots.release(slot, self._stream.mark())
            raise

    def _run_programs(
        self,
        batch: RaggedBatch,
        sampling: AnyStep,
        slot: Slot,
        inputs: DeviceInput | None,
    ) -> Plan:
        """Run each program over its sequences; return the plan that has the rows of all."""
        parts: dict[int, list[int]] = {}
        if self._variants and batch.adapters is not None:
            parts = sequences_of(batch, self._variants)
        if not parts.keys() - {-1}:
            plan = self._sent_plan(batch, sampling, slot, "step", inputs)
            self._run(plan)
            return plan

        # Each program reuses the memory of the others, so rows are copied out at once.
        rows_of_all: list[tuple[int, Ints, torch.Tensor]] = []
        for number, sequences in parts.items():
            part, rows_of_part, logit_rows, pooled_rows = part_of(batch, sequences)
            executable = self._variants.get(number, self)
            nothing = self._sampler.begin([])
            plan = executable._sent_plan(part, nothing, slot, f"part {number}")
            executable._run(plan)
            for i, value in enumerate(_results(executable.program)):
                places = {_POOLED: pooled_rows, _TAPS: rows_of_part}.get(i, logit_rows)
                if value and len(places):
                    rows = torch.empty(len(places), value.width, device=DEVICE)
                    self._stream.copy(rows, plan.value(value)[: len(places)])
                    rows_of_all.append((i, places, rows))

        plan = self._sent_plan(batch, sampling, slot, "step")
        for i, places, rows in rows_of_all:
            value = _results(self.program)[i]
            assert value
            for first, last in _runs(places):
                at = int(places[first])
                self._stream.copy(plan.value(value)[at : at + last - first], rows[first:last])
        return plan

    def _sent_plan(
        self,
        batch: RaggedBatch,
        sampling: AnyStep,
        slot: Slot,
        name: str,
        inputs: DeviceInput | None = None,
    ) -> Plan:
        """The plan of a batch, with its input on the device; `name` is of host memory."""
        plan, max_size = self._plan_of(batch, sampling.layout)
        self._send(plan, batch, sampling, slot, slot.reserve(name, max_size))
        if self._input and inputs:
            inputs(plan.value(self._input), slot)
        elif self._input:
            assert batch.inputs is not None, "a program with input rows needs them"
            rows = slot.take("inputs", *batch.inputs.shape, dtype=torch.float32)
            rows.array[:] = batch.inputs
            self._stream.copy(plan.value(self._input)[: len(rows.array)], rows.tensor)
        return plan

    def _plan_of(self, batch: RaggedBatch, layout: SampleLayout) -> tuple[Plan, int]:
        """The plan of a batch, and the max integers of its step, which then fit in the array."""
        plan = self._plan(shape_of(batch))
        tables_start = plan.step.end + _sample_ints(layout, self._sampler.mask_words)
        max_size = max_ints(batch, tables_start)
        if max_size > len(self._ints):
            self._grow(max_size)
            plan = self._plan(shape_of(batch))
        return plan, max_size

    def _plan(self, shape: StepShape) -> Plan:
        """The plan of a shape, made again if the memory that it is bound to has moved."""
        bound = (self._workspace.grown, self._adapters.changed)
        if bound != self._bound:
            self._plans.clear()
            self._num_late_graphs = 0
            self._bound = bound

        if shape not in self._plans:
            plan = self._plans[shape] = self._lowered(shape)
            # Lowering may itself grow the workspace, and so invalidate the plan.
            if self._workspace.grown != self._bound[0]:
                return self._plan(shape)
            if shape in self._captured:
                self._capture(plan)
        return self._plans[shape]

    def _lowered(self, shape: StepShape) -> Plan:
        stores = self._stores if self.program.kv_groups else []  # heads keep nothing
        step = StepInput(shape, self.program, stores, self._sampler.last_tokens)
        if len(self._ints) < step.end:
            self._grow(step.end)
        step.bind(self._ints)
        value = self._buffers.bind(self._workspace, shape.counts)
        adapters = self._adapters if shape.has_adapters else None
        lowering = Lowering(
            value=value,
            weights=self._weights,
            workspace=self._workspace,
            step=step,
            adapters=adapters,
            loads=self._loads.of_op,
            packed=self._packed,
            transport=self._transport,
        )
        names: list[str] = []
        for op in self.program.ops:
            lowering.lower(op)
            names += [op.name] * (len(lowering.launches) - len(names))
        return Plan(step=step, launches=lowering.launches, names=names, value=value, sampling={})

    @device_errors
    def prepare(self, max_rows: int, max_logit_rows: int) -> None:
        """Allocate memory for the largest steps. Compile the kernels of all steps without
        adapters, and capture graphs for steps whose rows all have logits.
        """
        if not self._stream.has_graphs:
            return
        self._max_rows = max_rows, max_logit_rows
        self._plan(prefill(max_rows, max_logit_rows))
        rows_with_graphs = graph_rows(min(max_rows, max_logit_rows))
        # The plan of the most rows comes first: later plans fit in its memory.
        plans = [self._plan(decoding(rows)) for rows in rows_with_graphs]
        compile_kernels(self._kernels_to_compile(plans, max_rows, max_logit_rows))
        for rows in with_progress(rows_with_graphs, len(rows_with_graphs), "graphs of steps"):
            shape = decoding(rows)
            self._captured.add(shape)
            self._capture(self._plan(shape))

    def _kernels_to_compile(
        self, plans: Sequence[Plan], max_rows: int, max_logit_rows: int
    ) -> Iterator[Launch]:
        for plan in plans:
            yield from plan.launches
        for rows in shape_rows(max_rows):
            yield from self._lowered(prefill(rows, min(rows, max_logit_rows))).launches
        for layout in common_layouts(self._sampler.num_slots) if self._logits else ():
            yield from self._sample_launches(plans[0], layout).launches

    def _capture(self, plan: Plan) -> None:
        # Kernels run once before their capture, here over padding rows. Exchanges do not: other
        # ranks may not capture this plan now.
        if plan.graph is None:
            slot = self._slots.next()
            host = slot.take("padding", plan.step.end)
            plan.step.fill_with_padding(host.array)
            self._stream.copy(self._ints[: plan.step.end], host.tensor)
            self._slots.release(slot, self._stream.mark())
            kernels = [launch for launch in plan.launches if not isinstance(launch, Exchange)]
            self._stream.run(kernels)
            plan.graph = self._stream.capture(plan.launches)

    def _run(self, plan: Plan) -> None:
        plan.num_runs += 1
        is_frequent = plan.num_runs > _RUNS_BEFORE_GRAPH and self._stream.has_graphs
        if is_frequent and plan.graph is None and self._num_late_graphs < _MAX_LATE_GRAPHS:
            plan.graph = self._stream.capture(plan.launches)
            self._num_late_graphs += 1
        if plan.graph:
            plan.graph()
        else:
            self._stream.run(plan.launches)

    def _grow(self, size: int) -> None:
        # Plans are bound to the old array: growth makes them invalid.
        self._ints = torch.zeros(max(_MIN_INTS, 2 * size), dtype=torch.int32, device=DEVICE)
        self._workspace.grown += 1

    def _send(
        self,
        plan: Plan,
        batch: RaggedBatch,
        sampling: AnyStep,
        slot: Slot,
        host: HostArray,
    ) -> None:
        ints, start, layout = host.array, plan.step.end, sampling.layout
        mask_words = self._sampler.mask_words
        tables_start = start + _sample_ints(layout, mask_words)

        sampling.fill(ints[start : start + layout.num_ints])
        if layout.masks:
            masks = ints[tables_start - layout.masks * mask_words : tables_start]
            sampling.fill_masks(masks.view(np.uint32).reshape(layout.masks, mask_words))
        used = plan.step.fill(batch, host.views(plan.step), ints, tables_start)
        self._stream.copy(self._ints[:used], host.tensor[:used])

    def _run_sampling(self, plan: Plan, layout: SampleLayout) -> torch.Tensor:
        if self._logits is None:
            return torch.empty(0, dtype=torch.int32, device=DEVICE)
        if layout not in plan.sampling:
            # A layout with another number of slots is bound to state that has moved.
            plan.sampling = {
                known: launches
                for known, launches in plan.sampling.items()
                if known.slots == layout.slots
            }
            plan.sampling[layout] = self._sample_launches(plan, layout)

        sampling = plan.sampling[layout]
        if plan.graph and sampling.has_run and not sampling.graph:
            sampling.graph = self._stream.capture(sampling.launches)
        if sampling.graph:
            sampling.graph()
        else:
            self._stream.run(sampling.launches)
            sampling.has_run = True
        return sampling.results

    def _sample_launches(self, plan: Plan, layout: SampleLayout) -> SampleLaunches:
        assert self._logits
        start, words = plan.step.end, self._sampler.mask_words
        tables_start = start + _sample_ints(layout, words)
        area = self._ints[start : start + layout.num_ints]
        masks = self._ints[tables_start - layout.masks * words : tables_start]
        results = torch.zeros(layout.num_results, dtype=torch.int32, device=DEVICE)
        logits = plan.value(self._logits)
        if self._vocabulary:
            logits = self._workspace.take("spread logits", len(logits), self._vocabulary.size)
        launches = self._sampler.launches(
            layout,
            logits,
            area,
            masks.reshape(layout.masks, words),
            results,
        )
        if self._vocabulary and layout.samples:
            launches.insert(0, self._vocabulary.spread(logits, plan.value(self._logits)))
        return SampleLaunches(launches, results)

    def _receive(
        self,
        plan: Plan,
        batch: RaggedBatch,
        sampling: AnyStep,
        ops: Sequence[LogitOp],
        sampled: torch.Tensor,
        slot: Slot,
        logits: bool,
        hidden: bool,
    ) -> CudaTicket:
        host_indices: list[int] = []
        if len(sampling.indices) < len(ops):
            host_indices = sorted(set(range(len(ops))) - set(sampling.indices))
        host_ops = [ops[i] for i in host_indices]

        results = slot.take("results", len(sampled))
        self._stream.copy(results.tensor, sampled)
        num_logit_rows = len(batch.logit_rows)
        num_pooled = 0 if batch.pooled_rows is None else len(batch.pooled_rows)
        values = {
            "logits": (self._logits if logits or host_ops else None, num_logit_rows),
            "hidden": (self.program.hidden if hidden else None, num_logit_rows),
            "taps": (self.program.taps if hidden else None, len(batch.tokens)),
            "pooled": (self.program.pooled if batch.pooled_rows is not None else None, num_pooled),
        }
        rows: dict[str, NDArray[np.float32]] = {}
        kept_taps: KeptStep | None = None
        if self._tap_store and (taps := values.pop("taps")[0]):
            kept_taps = self._tap_store.keep(plan.value(taps), len(batch.tokens), slot)
        for name, (value, count) in values.items():
            if value:
                host = slot.take(name, count, value.width, dtype=torch.float32)
                self._stream.copy(host.tensor, plan.value(value)[:count])
                rows[name] = host.array
        mark = self._stream.mark()
        number = self._num_launches

        def read() -> StepResult:
            # The next launch may reuse the slot at once: it comes after this read.
            self._slots.release(slot, mark)
            op_results: list[LogitOpResult] = [None] * len(ops)
            for i, result in zip(sampling.indices, sampling.read(results.array), strict=True):
                op_results[i] = result

            if host_ops:
                host_results = self._run_on_host(host_ops, rows["logits"], rows.get("pooled"))
                for i, result in zip(host_indices, host_results, strict=True):
                    op_results[i] = result
                # The last tokens on the device belong to the last launch. A launch that came
                # before this read has written its own.
                if number == self._num_launches:
                    self._sampler.set_last_tokens(host_indices, host_results)
            return StepResult(
                values=op_results,
                logits=rows.get("logits") if logits else None,
                hidden=rows.get("hidden"),
                taps=rows.get("taps"),
                kept_taps=kept_taps,
            )

        def cancel() -> None:
            sampling.cancel()
            self._slots.release(slot, mark)

        samples_on_host = any(not isinstance(op, Pool) for op in host_ops)
        return CudaTicket(mark, read, cancel, self._in_flight, samples_on_host)

    def _run_on_host(
        self,
        ops: Sequence[LogitOp],
        logits: NDArray[np.float32],
        pooled: NDArray[np.float32] | None,
    ) -> list[LogitOpResult]:
        if self._vocabulary:
            return self._vocabulary.run_on_host(ops, logits)
        return host_sampling.run_logit_ops(ops, logits, pooled)

    def forget_launches(self) -> None:
        """Forget the launches in flight and all graphs, after exchanges have ended with an error.

        Graphs belong to the communicators of their exchanges.
        """
        for ticket in self._in_flight:
            ticket.cancel()
        self._in_flight.clear()
        for executable in (self, *self._variants.values()):
            executable._plans.clear()
            executable._num_late_graphs = 0

    @device_errors
    def profile(self, batch: RaggedBatch) -> StepTimes:
        start = time.perf_counter()
        sampling = self._sampler.begin([])
        slot = self._slots.next()
        plan = self._sent_plan(batch, sampling, slot, "step")
        self._slots.release(slot, self._stream.mark())
        prepared = time.perf_counter() - start

        op_seconds: dict[str, float] = {}
        for name, seconds in zip(plan.names, self._stream.times(plan.launches), strict=True):
            op_seconds[name] = op_seconds.get(name, 0.0) + seconds
        return StepTimes(prepared + sum(op_seconds.values()), op_seconds, 0)

    @device_errors
    def expert_loads(self) -> NDArray[np.int64]:
        is_idle = not self._in_flight
        table = self._loads.table(is_idle)
        for variant in self._variants.values():
            table = table + variant._loads.table(is_idle)
        return table

    @device_errors
    def add_adapter(self, adapter: Adapter) -> int:
        """Raises UnsupportedModelError for a weight that the model does not use."""
        low_rank = low_rank_part(adapter)
        if len(low_rank) == len(adapter):
            self._stream.catch_up()
            return self._add(low_rank)
        own = own_weights(self._traced, adapter, self._weights.tensors)
        tensors = {own_name(name): tensor for name, tensor in own.items()}
        return self.add_variant(with_own_weights(self._traced, own), tensors, low_rank)

    @device_errors
    def add_variant(
        self,
        program: Program,
        own: Mapping[str, StoredTensor],
        low_rank: Mapping[str, LowRank],
    ) -> int:
        """Add an adapter with weights of its `own`, which has this program, over the same KV,
        adapters and sampler.
        """
        self._stream.catch_up()
        variant = copy(self)
        variant._weights = self._weights.with_own(own)
        variant._set_program(program)
        variant._sampler = self._sampler
        variant._plan(decoding(1))  # packs the weights
        return self._add(low_rank, variant)

    def _add(self, low_rank: Mapping[str, LowRank], variant: "CudaExecutable | None" = None) -> int:
        changed = self._adapters.changed
        number = self._adapters.add(low_rank)
        if variant or self._adapters.changed > changed:
            try:
                compile_kernels((variant or self)._kernels_with_adapters())
            except BaseException:
                self._adapters.remove(number)
                raise
        if variant:
            self._variants[number] = variant
        return number

    def _kernels_with_adapters(self) -> Iterator[Launch]:
        # The first steps with adapters would compile them one by one, and all requests would wait.
        if self._max_rows is None:
            return
        max_rows, max_logit_rows = self._max_rows
        shapes = [decoding(rows) for rows in graph_rows(min(max_rows, max_logit_rows))]
        shapes += [prefill(rows, min(rows, max_logit_rows)) for rows in shape_rows(max_rows)]
        for shape in shapes:
            yield from self._lowered(shape._replace(has_adapters=True)).launches

    @device_errors
    def remove_adapter(self, number: int) -> None:
        self._stream.catch_up()
        self._adapters.remove(number)
        self._variants.pop(number, None)

    @device_errors
    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        self._stream.catch_up()
        self._stores[group].move_slots(source, target)

    @device_errors
    def host_blocks(self, num_bytes: int) -> HostBlocks | None:
        counts = host_block_counts(
            num_bytes, [(store.num_blocks, store.block_bytes) for store in self._stores]
        )
        return self.make_host_blocks(counts) if all(counts) else None

    @device_errors
    def make_host_blocks(self, counts: Sequence[int]) -> CudaHostBlocks:
        """Host blocks, `counts` of each KV group. Raises MemoryLimitError without memory."""
        return CudaHostBlocks(self._stores, counts, self._stream)

    def close(self) -> None:
        self._variants.clear()
        del self._plans, self._weights, self._stores, self._workspace, self._sampler, self._ints


def _results(program: Program) -> tuple[Value | None, ...]:
    return program.logits, program.hidden, program.pooled, program.taps


def _runs(places: Ints) -> list[tuple[int, int]]:
    """The first and last + 1 index of each run of adjacent places."""
    starts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist()]
    return list(pairwise([*starts, len(places)]))


def _sample_ints(layout: SampleLayout, mask_words: int) -> int:
    """Integers of a step's sampling tables and masks; masks begin at a multiple of 16 bytes."""
    return -(-layout.num_ints // 4) * 4 + layout.masks * mask_words
