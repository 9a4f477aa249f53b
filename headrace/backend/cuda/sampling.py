"""Sampling on the device: logit ops as tables for kernels, and their results.

All nodes of a draft tree sample at once, since a sample depends only on its ancestors.
Then a kernel walks down the tree along the sampled tokens. Tokens equal
`sampling/exact.py`: scores in float64 decide, as on the CPU. Only a nucleus whose share
almost equals `top_p` may differ, by rounding.
"""

from collections.abc import Sequence
from math import inf
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.backend.cuda.kernels import sample_table as table
from headrace.backend.cuda.kernels.logprobs import logprobs
from headrace.backend.cuda.kernels.sample_adjust import sample_adjust
from headrace.backend.cuda.kernels.sample_chunks import CHUNK, sample_chunks
from headrace.backend.cuda.kernels.sample_filter import LISTED, sample_filter
from headrace.backend.cuda.kernels.sample_verify import sample_verify
from headrace.backend.cuda.launch import Launch, blocks, power_of_2
from headrace.backend.cuda.plain_samples import PlainSamples, PlainStep
from headrace.backend.cuda.sampling_layout import PendingOp, SampleLayout, results_of
from headrace.backend.cuda.sampling_options import DeviceSamplers
from headrace.batch import NO_DRAFT, DraftTree, Ints
from headrace.constraint import mask_words
from headrace.logit_ops import (
    ALL_LOGPROBS,
    Expand,
    Expanded,
    LaterExpands,
    LogitOp,
    LogitOpResult,
    SampleOp,
    SampleResult,
    Score,
)
from headrace.sampling.sampler import Sampler

_MAX_OPS = 1 << 16
# Columns of a sample that change from step to step
_FIRST_OF_STEP, _LAST_OF_STEP = int(table.ROW.value), int(table.IS_ADJUSTED.value)


def runs_on_device(op: LogitOp) -> bool:
    """Whether the device runs an op; else the host does."""
    if isinstance(op, SampleOp):
        is_short = op.num_logprobs < ALL_LOGPROBS
        is_exact = op.method == "exact" or (op.method == "typical" and not op.draft.tokens)
        return is_short and is_exact
    return isinstance(op, Score) or (
        isinstance(op, Expand) and op.width == 1 and not op.probabilities and op.tokens is None
    )


class SampleStep:
    """Ops of one launch that the device runs, at positions `indices`."""

    def __init__(self, ops: Sequence[LogitOp], samplers: DeviceSamplers) -> None:
        self.indices = [i for i, op in enumerate(ops) if runs_on_device(op)]
        self.samplers = samplers
        self._pending: list[PendingOp] = []
        self._templates: list[Ints] = []
        self._rows: list[tuple[int, ...]] = []  # columns ROW to IS_ADJUSTED of each sample
        self._op_rows: list[tuple[int, int, int, int]] = []
        self._entries: list[Ints] = []
        self._num_entries = 0
        self._masks: list[NDArray[np.uint32]] = []
        self._num_masks = 0
        self._described: list[tuple[int, int, int, int]] = []
        self._nodes, self._top = 1, 0
        # Whether all ops are expand ops without masks, and how many positions later their
        # entries are the same
        self._is_chains = all(isinstance(op, Expand) and op.masks is None for op in ops)
        self._max_shift: float = inf
        self._is_adjusted = self._is_noisy = self._is_filtered = self._has_state = False
        try:
            for i in self.indices:
                self._add(i, ops[i])
        except BaseException:
            self.cancel()
            raise
        self.layout = self._layout()

    def cancel(self) -> None:
        # The launch has failed: the device's state of its samplers is unknown.
        for pending in self._pending:
            if not isinstance(pending.op, Score):
                self.samplers.finish_launch(cast(Sampler, pending.op.sampler), [], is_known=False)

    def _add(self, index: int, op: LogitOp) -> None:
        if isinstance(op, Score):
            self._pending.append(PendingOp(op, -1, len(self._described)))
            self._describe(op.row, -1, op.token, op.num_logprobs)
        elif isinstance(op, SampleOp):
            self._add_samples(index, op, op.draft, op.num_logprobs)
        elif isinstance(op, Expand):
            self._add_samples(index, op, NO_DRAFT, -1)

    def _add_samples(
        self, index: int, op: SampleOp | Expand, draft: DraftTree, num_logprobs: int
    ) -> None:
        sampler = self.samplers.start_launch(cast(Sampler, op.sampler))
        first, num_rows = len(self._rows), 1 + len(draft.tokens)
        self._pending.append(
            PendingOp(op, first, len(self._described) if num_logprobs >= 0 else -1)
        )
        mask = -1 if op.masks is None else self._num_masks
        if op.masks is not None:
            self._masks.append(op.masks)
            self._num_masks += num_rows
        paths: list[list[int]] = [[]]
        for node, (token, parent) in enumerate(
            zip([-1, *draft.tokens], [-2, *draft.parents], strict=True)
        ):
            if node:
                paths.append([*paths[parent + 1], token])
            position = op.position + len(paths[node])
            entries = sampler.entries(position, paths[node])
            self._max_shift = min(self._max_shift, sampler.max_shift(position))
            node_mask = mask + node if mask >= 0 else -1
            is_adjusted = len(entries) > 0 or mask >= 0 or sampler.slot >= 0
            self._rows.append(
                (
                    op.row + node,
                    position,
                    parent,
                    token,
                    sampler.slot,
                    node_mask,
                    self._num_entries,
                    len(entries),
                    is_adjusted,
                )
            )
            self._is_adjusted |= is_adjusted
            self._templates.append(sampler.row)
            if len(entries):
                self._entries.append(entries)
                self._num_entries += len(entries)
            if num_logprobs >= 0:
                self._describe(op.row + node, first + node, -1, num_logprobs)
        self._op_rows.append((first, num_rows, sampler.slot, index))
        self._nodes = max(self._nodes, num_rows)
        self._has_state |= sampler.has_penalties
        self._is_noisy |= sampler.is_noisy
        self._is_filtered |= sampler.is_filtered

    def _describe(self, row: int, sample: int, token: int, num_logprobs: int) -> None:
        top = min(num_logprobs, self.samplers.state.shape[1])
        self._described.append((row, sample, token, top))
        self._top = max(self._top, top)

    def _layout(self) -> SampleLayout:
        sizes = len(self._rows), self._num_entries, self._num_masks, len(self._described), self._top
        samples, entries, masks, described, top = (
            power_of_2(size) if size else 0 for size in sizes
        )
        return SampleLayout(
            samples=samples,
            nodes=power_of_2(self._nodes),
            entries=entries,
            masks=masks,
            described=described,
            top=top,
            slots=len(self.samplers.state),
            is_adjusted=self._is_adjusted,
            is_noisy=self._is_noisy,
            is_filtered=self._is_filtered,
        )

    def goes_on(self, shift: int) -> bool:
        """Whether the samples differ only by their positions, `shift` positions later."""
        return self._is_chains and shift <= self._max_shift

    def samplers_with_state(self, count: int) -> dict[int, Sampler]:
        """The samplers of the first `count` ops that have penalties, by the number of the op."""
        if not self._has_state:
            return {}
        ops = [pending.op for pending in self._pending[:count]]
        samplers = {
            i: cast(Sampler, op.sampler) for i, op in enumerate(ops) if isinstance(op, Expand)
        }
        return {i: sampler for i, sampler in samplers.items() if sampler.has_penalties}

    def fill(self, host: Ints) -> None:
        samples, ops, entries, described = self.layout.inputs(host)
        size = len(self._rows)
        if size:
            samples[:size] = self._templates
            samples[:size, _FIRST_OF_STEP : _LAST_OF_STEP + 1] = self._rows
            ops[: len(self._op_rows)] = self._op_rows
        samples[size:] = 0
        samples[size:, _FIRST_OF_STEP] = -1
        ops[len(self._op_rows) :, table.FIRST_SAMPLE.value] = -1
        if self._entries:
            np.concatenate(self._entries, out=entries[: self._num_entries])
        if self._described:
            described[: len(self._described)] = self._described
        described[len(self._described) :, table.DESCRIBED_ROW.value] = -1

    def fill_masks(self, host: NDArray[np.uint32]) -> None:
        """Write the masks to an area [layout.masks, words]."""
        if self._masks:
            np.concatenate(self._masks, out=host[: self._num_masks])

    def read(self, host: Ints) -> list[LogitOpResult]:
        """Results of the ops, whose tokens are appended to the samplers. Call once per
        launch, in order.
        """
        results = results_of(self._pending, self.layout, host)
        for pending, (tokens, result) in zip(self._pending, results, strict=True):
            if not isinstance(pending.op, Score):
                kept = [] if result is None else tokens
                self.samplers.finish_launch(
                    cast(Sampler, pending.op.sampler), kept, is_known=len(kept) == len(tokens)
                )
        return [result for _, result in results]


class LaterStep:
    """Samples of the next depth of chains: the first samples of a step, some positions later."""

    def __init__(self, step: SampleStep, area: Ints, shift: int, count: int) -> None:
        self.layout, self.indices = step.layout, range(count)
        self._step, self._area, self._shift = step, area, shift
        for sampler in step.samplers_with_state(count).values():
            step.samplers.start_launch(sampler)

    def fill(self, host: Ints) -> None:
        host[:] = self._area
        samples, ops, *_ = self.layout.inputs(host)
        count = len(self.indices)
        samples[:count, table.POSITION.value] += self._shift
        # Also the flags: kernels adjust and filter by them, whatever the row is.
        samples[count:] = 0
        samples[count:, _FIRST_OF_STEP] = -1
        ops[count:, table.FIRST_SAMPLE.value] = -1

    def fill_masks(self, host: NDArray[np.uint32]) -> None: ...

    def read(self, host: Ints) -> list[LogitOpResult]:
        tokens, _, counts = self.layout.results(host)[0][:, : len(self.indices)].tolist()
        for i, sampler in self._step.samplers_with_state(len(self.indices)).items():
            self._step.samplers.finish_launch(sampler, [tokens[i]] if counts[i] else [])
        return [
            Expanded([token], None) if count else None
            for token, count in zip(tokens, counts, strict=True)
        ]

    def cancel(self) -> None:
        for sampler in self._step.samplers_with_state(len(self.indices)).values():
            self._step.samplers.finish_launch(sampler, [], is_known=False)


AnyStep = SampleStep | PlainStep | LaterStep


class DeviceSampler:
    """Sampling of one executable, whose launches share a stream."""

    def __init__(
        self, vocab: int, device: torch.device, chunk: int = CHUNK, listed: int = LISTED
    ) -> None:
        # Last token of each op of the last launch, which `token_source` indexes; 0 if
        # its logits were not finite
        self.last_tokens = torch.zeros(_MAX_OPS, dtype=torch.int32, device=device)
        self._samplers, self._plain = DeviceSamplers(vocab, device), PlainSamples()
        self._adjusted = torch.empty((0, -(-vocab // 16) * 16), dtype=torch.float32, device=device)
        self._vocab, self._chunk, self._listed = vocab, chunk, listed
        # The last ops that may begin chains, with their step and its filled area
        self._chains: tuple[Sequence[LogitOp], SampleStep, Ints] | None = None

    @property
    def num_slots(self) -> int:
        return len(self._samplers.state)

    @property
    def mask_words(self) -> int:
        return mask_words(self._vocab)

    def must_wait(self, ops: Sequence[LogitOp]) -> bool:
        """Whether launches in flight must be read before these ops run."""
        samplers = [
            cast(Sampler, op.sampler)
            for op in ops
            if isinstance(op, SampleOp | Expand) and runs_on_device(op)
        ]
        return any(map(self._samplers.must_wait, samplers))

    def repeat(self, ops: Sequence[LogitOp]) -> PlainStep | LaterStep | None:
        """A step without `begin`, for plain ops or chains that are the last ones at other
        positions.
        """
        if isinstance(ops, LaterExpands):
            return self._later(ops)
        return self._plain.repeat(ops, len(self._samplers.state))

    def _later(self, later: LaterExpands) -> LaterStep | None:
        if self._chains is None:
            return None
        ops, step, area = self._chains
        is_same = later.ops is ops and step.layout.slots == self.num_slots
        if not is_same or not step.goes_on(later.shift):
            return None
        return LaterStep(step, area, later.shift, len(later))

    def begin(self, ops: Sequence[LogitOp], *, with_chains: bool = False) -> SampleStep:
        """The step of a launch's ops. Call once per launch, in order.

        `with_chains`: the ops are expand ops of chains, which may go on (`LaterExpands`).
        """
        if len(ops) > _MAX_OPS:
            raise ValueError(f"launch of {len(ops)} ops exceeds {_MAX_OPS}; split the step")
        step = SampleStep(ops, self._samplers)
        if not step.layout.is_adjusted:
            self._plain.keep(ops, step.layout, step.fill)
        self._chains = None
        if with_chains and step.goes_on(0):
            area = np.zeros(step.layout.num_ints, np.int32)
            step.fill(area)
            self._chains = ops, step, area
        return step

    def set_last_tokens(self, indices: Sequence[int], values: Sequence[LogitOpResult]) -> None:
        """Set the last tokens of ops that ran on the host."""
        tokens = [
            value.tokens[-1] if isinstance(value, SampleResult | Expanded) else 0
            for value in values
        ]
        positions = torch.tensor(list(indices), dtype=torch.int64, device=self.last_tokens.device)
        self.last_tokens[positions] = torch.tensor(
            tokens, dtype=torch.int32, device=self.last_tokens.device
        )

    def launches(
        self, layout: SampleLayout, logits: torch.Tensor, area: Any, masks: Any, results: Any
    ) -> list[Launch]:
        """Sampling kernels for all steps of one layout, on logits [rows, vocab].

        `area` [num_ints] begins at a multiple of 16 bytes; `masks` is [masks, words],
        `results` [num_results]. A layout is invalid when `slots` changes.
        """
        samples, op_table, entries, described = layout.inputs(area)
        sampled, described_out, top_ids, top_logprobs = layout.results(results)
        state, device = self._samplers.state, logits.device
        assert len(state) == layout.slots, "the state of penalties has moved"

        launches: list[Launch] = []
        tokens = torch.empty(layout.samples, dtype=torch.int32, device=device)
        if layout.samples:
            launches += self._token_launches(layout, logits, area, samples, entries, masks, tokens)
        if layout.described:
            launches += logprobs(
                logits,
                described,
                tokens,
                self._chunks(layout.described, device),
                (
                    described_out[0],
                    described_out[1].view(torch.float32),
                    top_ids,
                    top_logprobs.view(torch.float32),
                ),
                self._chunk,
            )
        if layout.samples:
            launches.append(
                sample_verify(
                    samples,
                    op_table,
                    tokens,
                    state,
                    self.last_tokens,
                    tuple(sampled),
                    layout.nodes,
                )
            )
        return launches

    def _token_launches(
        self,
        layout: SampleLayout,
        logits: torch.Tensor,
        area: Any,
        samples: Any,
        entries: Any,
        masks: Any,
        tokens: torch.Tensor,
    ) -> list[Launch]:
        launches: list[Launch] = []
        device, state = logits.device, self._samplers.state
        doubles = area[: samples.numel()].view(torch.float64)

        adjusted = logits
        if layout.is_adjusted:
            adjusted = self._adjusted_rows(layout.samples)
            launches += sample_adjust(logits, samples, entries, state, masks, adjusted, self._chunk)

        tops = torch.empty(layout.samples, dtype=torch.float32, device=device)
        chunks = self._chunks(layout.samples, device)
        launches += sample_chunks(
            logits,
            adjusted,
            samples,
            doubles,
            chunks,
            tops,
            tokens,
            layout.is_noisy,
            self._chunk,
        )

        if layout.is_filtered:
            filtering = sample_filter(
                logits,
                adjusted,
                samples,
                doubles,
                chunks[0],
                self._lists(layout.samples, device),
                tops,
                tokens,
                self._chunk,
                self._listed,
            )
            launches.append(filtering)
        return launches

    def _chunks(self, rows: int, device: Any) -> Any:
        shape = rows, blocks(self._vocab, self._chunk)
        kinds = torch.float32, torch.int32, torch.float32, torch.int32
        return tuple(torch.empty(shape, dtype=kind, device=device) for kind in kinds)

    def _lists(self, rows: int, device: Any) -> Any:
        return tuple(
            torch.empty((rows, self._listed), dtype=kind, device=device)
            for kind in (torch.float32, torch.int32)
        )

    def _adjusted_rows(self, rows: int) -> torch.Tensor:
        if len(self._adjusted) < rows:
            self._adjusted = self._adjusted.new_empty((rows, self._adjusted.shape[1]))
        return self._adjusted[:rows]
