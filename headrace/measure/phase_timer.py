"""Times the steps of phases on a compiled model."""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable, compile_program
from headrace.batch import KvRows, RaggedBatch, StepTimes, ints
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.errors import HeadraceError
from headrace.loader.drafts import model_program, target_program
from headrace.loader.ranks import compile_ranks
from headrace.measure.op_profile import Phase
from headrace.parallel.config import mesh_of, threads_per_rank
from headrace.planner import hardware
from headrace.planner.roofline import PREFILL_CHUNK
from headrace.program.op import StepSize

_MIN_SECONDS = 0.3
"""Minimum seconds of a turn."""


def num_blocks(phase: Phase, block_size: int) -> int:
    return phase.seqs * -(-phase.length // block_size)


def step_blocks(step: StepSize, block_size: int) -> int:
    """KV blocks of a step's batch: all sequences have as many as the longest."""
    length = max(context + rows for context, rows in step.seqs)
    return len(step.seqs) * -(-length // block_size)


def step_phase(step: StepSize) -> Phase:
    """A phase of one step."""
    depth = step.seqs[0][0]
    return Phase(name="", seqs=len(step.seqs), depth=depth, tokens=step.rows, steps=(step,))


class Roof:
    """The bandwidth around measurements: that of a shared machine changes by the minute."""

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads
        self._last = hardware.bandwidth_now(threads)

    def around(self) -> float:
        """The mean of a new reading and the one before."""
        before, self._last = self._last, hardware.bandwidth_now(self._threads)
        return (before + self._last) / 2


def _prefix_ids(checkpoint: Checkpoint) -> Sequence[int]:
    """Return the tokens that begin a prompt; a model without a tokenizer has none."""
    try:
        return checkpoint.load_tokenizer().prefix_ids
    except HeadraceError:
        return ()


class PhaseTimer:
    """A compiled model with `blocks` written KV blocks in each group.

    Reading unwritten pages is free, which would falsify times. Only the first rank is timed.
    """

    def __init__(
        self, model: str, checkpoint: Checkpoint, config: EngineConfig, blocks: int
    ) -> None:
        program, mesh = model_program(config, checkpoint), mesh_of(config)
        threads = threads_per_rank(config, mesh)
        self._num_groups = len(program.kv_groups)
        self._block_size = config.traits.kv_block_size
        self._vocab_size = checkpoint.spec.vocab_size
        self._prefix = np.array(_prefix_ids(checkpoint), np.int32)
        self.adapter: int | None = None
        """Number of the adapter that all sequences use."""
        kv = KvConfig(
            num_blocks=(blocks,) * self._num_groups,
            block_size=self._block_size,
            dtype=config.kv_format,
        )

        self.executable: Executable
        if mesh.ranks > 1:
            program = target_program(config, checkpoint)
            ranks = compile_ranks(model, config, mesh, checkpoint, program, kv)
            ranks.connect()
            self.executable = ranks
        else:
            self.executable = compile_program(
                config.backend, program, checkpoint.tensors, kv, threads, config.activations
            )
        self._write_kv(blocks)

    def _write_kv(self, blocks: int) -> None:
        slots = np.arange(blocks * self._block_size, dtype=np.int32)
        filled = min(PREFILL_CHUNK, len(slots))
        self.executable.launch(self._batch(StepSize(((0, filled),), 1, 0))).wait()
        for group in range(self._num_groups):
            self.executable.move_slots(group, slots[filled:] % filled, slots[filled:])

    def time_phase(self, phase: Phase, seconds: float = _MIN_SECONDS) -> list[list[StepTimes]]:
        """Times of all steps in each round, for at least `seconds`. Every round writes the same
        KV.
        """
        batches = [self._batch(load) for load in phase.steps]
        end = time.monotonic() + seconds
        rounds = [[self.executable.profile(batch) for batch in batches]]
        while time.monotonic() < end:
            rounds.append([self.executable.profile(batch) for batch in batches])
        return rounds

    def expert_rows(self, phase: Phase) -> list[NDArray[np.int64]]:
        """Rows of each expert by step, [ops over experts, experts]."""
        steps = []
        for batch in map(self._batch, phase.steps):
            before = self.executable.expert_loads()
            self.executable.launch(batch).wait()
            steps.append(self.executable.expert_loads() - before)
        return steps

    def close(self) -> None:
        self.executable.close()

    def _batch(self, load: StepSize) -> RaggedBatch:
        context, rows = np.array(load.seqs, np.int32).T.copy()
        ends = np.cumsum(rows, dtype=np.int32)
        seq = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
        row = np.arange(ends[-1], dtype=np.int32)
        positions = row - (ends - rows)[seq] + context[seq]

        tokens = row * 37 % self._vocab_size
        begins = positions < len(self._prefix)
        tokens[begins] = self._prefix[positions[begins]]

        blocks = -(-int((context + rows).max()) // self._block_size)
        slots = seq * (blocks * self._block_size) + positions
        block_table = np.arange(len(rows) * blocks, dtype=np.int32).reshape(len(rows), blocks)
        return RaggedBatch(
            tokens=tokens,
            positions=positions,
            row_start=np.concatenate([[0], ends]).astype(np.int32),
            context_len=context,
            scheduled_len=rows,
            kv=(KvRows(slots, block_table),) * self._num_groups,
            ancestors=None,
            logit_rows=ends - 1,
            seq_of=np.arange(len(rows), dtype=np.int32),
            adapters=None if self.adapter is None else ints([self.adapter] * len(rows)),
        )
