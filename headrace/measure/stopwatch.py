"""Runs the phases of a profile on a model and takes the time of every step."""

import time

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable, compile_program
from headrace.batch import KvRows, RaggedBatch, StepTimes
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.loader.drafts import target_program
from headrace.loader.ranks import compile_ranks
from headrace.model import trace_model
from headrace.parallel.config import mesh_of, threads_per_rank
from headrace.planner.profile import Phase
from headrace.planner.roofline import PREFILL_CHUNK
from headrace.program.op import StepSize

_SECONDS = 0.3
"""Of a turn: a phase goes on for so long, and its last round is always a whole one."""


def num_blocks(phase: Phase, block_size: int) -> int:
    """KV blocks of so many tokens that a phase needs."""
    return phase.seqs * -(-phase.length // block_size)


class Stopwatch:
    """A compiled model whose KV is written to the last of `blocks` blocks in each group: a page
    never written costs nothing to read.

    Of several ranks the first is timed.
    """

    def __init__(
        self, model: str, checkpoint: Checkpoint, config: EngineConfig, blocks: int
    ) -> None:
        program, mesh = trace_model(checkpoint.spec, checkpoint.tensors), mesh_of(config)
        self._num_groups, self._block_size = len(program.kv_groups), config.traits.kv_block_size
        kv, threads = (
            KvConfig((blocks,) * self._num_groups, self._block_size, config.kv_dtype),
            threads_per_rank(config, mesh),
        )
        self.executable: Executable
        if mesh.ranks > 1:
            ranks = compile_ranks(
                model, config, mesh, checkpoint, target_program(config, checkpoint), kv
            )
            ranks.connect()
            self.executable = ranks
        else:
            self.executable = compile_program(
                config.backend, program, checkpoint.tensors, kv, threads, config.activations
            )
        self._vocab = checkpoint.spec.vocab_size
        slots = np.arange(blocks * self._block_size, dtype=np.int32)
        filled = min(PREFILL_CHUNK, len(slots))
        self.executable.launch(self._batch(StepSize(((0, filled),), 1, 0))).wait()
        for group in range(self._num_groups):
            self.executable.move_slots(group, slots[filled:] % filled, slots[filled:])

    def turn(self, phase: Phase) -> list[list[StepTimes]]:
        """The times of all steps of the phase, once or several times over. What a round writes to
        the KV is the same each time.
        """
        batches = [self._batch(step) for step in phase.steps]
        end = time.monotonic() + _SECONDS
        rounds = [[self.executable.profile(batch) for batch in batches]]
        while time.monotonic() < end:
            rounds.append([self.executable.profile(batch) for batch in batches])
        return rounds

    def expert_rows(self, phase: Phase) -> list[NDArray[np.int64]]:
        """The rows that go to each expert in each step of the phase, [ops over experts,
        experts].
        """
        steps = []
        for batch in map(self._batch, phase.steps):
            before = self.executable.expert_loads()
            self.executable.launch(batch).wait()
            steps.append(self.executable.expert_loads() - before)
        return steps

    def close(self) -> None:
        self.executable.close()

    def _batch(self, step: StepSize) -> RaggedBatch:
        """A step of this load: sequence after sequence, each with blocks of its own in order, and
        logits for its last row.
        """
        context, rows = np.array(step.seqs, np.int32).T.copy()
        ends = np.cumsum(rows, dtype=np.int32)
        seq = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
        row = np.arange(ends[-1], dtype=np.int32)
        positions = row - (ends - rows)[seq] + context[seq]
        blocks = -(-int((context + rows).max()) // self._block_size)
        slots, block_table = (
            seq * (blocks * self._block_size) + positions,
            np.arange(len(rows) * blocks, dtype=np.int32),
        )
        return RaggedBatch(
            tokens=row * 37 % self._vocab,
            positions=positions,
            row_start=np.concatenate([[0], ends]).astype(np.int32),
            context_len=context,
            scheduled_len=rows,
            kv=(KvRows(slots, block_table.reshape(len(rows), blocks)),) * self._num_groups,
            ancestors=None,
            logit_rows=ends - 1,
            seq_of=np.arange(len(rows), dtype=np.int32),
        )
