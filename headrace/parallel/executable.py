"""A model on several ranks as an executable: rank 0 runs here and commands the others."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable, HostBlocks
from headrace.batch import Ints, RaggedBatch, StepTimes, ints
from headrace.config import KvConfig
from headrace.logit_ops import LogitOp, LogitOpResult, StepResult, Ticket
from headrace.parallel.commands import Command, CommandKind, adapter_to_arrays, batch_to_arrays
from headrace.parallel.rank import Rank
from headrace.parallel.workers import Workers
from headrace.program.adapter import Adapter
from headrace.program.kv import KvGroup
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.sampling.host import tokens_of
from headrace.stats import StageStep


class ParallelExecutable:
    """The program of all ranks.

    A launch raises RankLostError for a lost rank; the next restarts the ranks without KV. An error
    in the work of a rank that lives ends the launch alone.
    """

    def __init__(self, rank: Rank[Any], program: Program, workers: Workers) -> None:
        self._rank, self._workers = rank, workers
        self.max_in_flight = rank.max_in_flight
        self._number = 0
        self._last_ticket: _Ticket | None = None
        self._set_program(program)

    def _set_program(self, program: Program) -> None:
        self._local = self._rank.executables[self._number]
        self.program = self._local.program
        self.kv_groups: tuple[KvGroup, ...] = program.kv_groups

    def connect(self) -> None:
        try:
            self._workers.connect()
        except BaseException:
            self.close()
            raise

    def prepare(self, max_rows: int, max_logit_rows: int) -> None:
        # Ranks of one host share the cache of compiled kernels, which rank 0 fills.
        self._local.prepare(max_rows, max_logit_rows)
        sizes = ints([max_rows, max_logit_rows])
        with self._working():
            self._workers.send(Command(CommandKind.PREPARE, self._number, [sizes]))

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> "_Ticket":
        if batch.token_source is not None and not self._rank.has_last_tokens:
            values: Sequence[LogitOpResult] = ()
            if self._last_ticket:
                values = self._last_ticket.wait().values
            batch = batch._replace(tokens=tokens_of(batch, values), token_source=None)
        with self._working():
            self._workers.send(Command(CommandKind.RUN, self._number, batch_to_arrays(batch)))
            ticket = self._rank.launch(self._number, batch, ops, logits=logits, hidden=hidden)
        self._last_ticket = _Ticket(ticket, self, self._workers.generation)
        return self._last_ticket

    def wait_for(self, ticket: Ticket, generation: int) -> StepResult:
        """Return the results of a launch. Raises RankLostError if its exchanges have ended."""
        with self._working(generation):
            result = ticket.wait()
            if self._rank.launches_ahead:
                self._workers.check()  # a lost rank leaves results of no meaning
            return result

    @contextmanager
    def _working(self, generation: int | None = None) -> Iterator[None]:
        before = self._workers.generation
        try:
            with self._workers.working(generation):
                yield
        finally:
            if self._workers.generation != before:
                self._rank.forget_steps()

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> Executable:
        """Attach a program. A program with its own KV runs on rank 0 alone."""
        attached = self._rank.attach(program, weights, kv)
        if kv is not None:
            return attached
        other = copy(self)
        other._number = len(self._rank.executables) - 1
        other._set_program(program)
        return other

    def profile(self, batch: RaggedBatch) -> StepTimes:
        with self._working():
            self._workers.send(Command(CommandKind.RUN, self._number, batch_to_arrays(batch)))
            times: StepTimes = self._local.profile(batch)
        return times

    def stage_steps(self) -> list[StageStep]:
        """Return the last step times of all ranks, comparable on one machine.

        Raises RankLostError.
        """
        answers = self._workers.ask(Command(CommandKind.STAGE_STEPS))
        ranks = {0: self._rank.stage_steps()} | {
            rank: np.frombuffer(answer).reshape(-1, 2) for rank, answer in answers.items()
        }
        return [
            StageStep(rank, number, float(begin), float(end))
            for rank, steps in ranks.items()
            for number, (begin, end) in enumerate(steps)
        ]

    def expert_loads(self) -> NDArray[np.int64]:
        loads: NDArray[np.int64] = self._local.expert_loads()
        return loads

    def add_adapter(self, adapter: Adapter) -> int:
        """Add an adapter on all ranks. The loss of a rank delays it until the restart.

        Raises UnsupportedModelError for a weight that the model does not use, RankFailedError if
        a rank cannot hold it.
        """
        number = self._rank.add_adapter(adapter)
        try:
            self._workers.add_adapter(number, adapter_to_arrays(adapter))
        except BaseException:
            self._rank.remove_adapter(number)
            raise
        return number

    def remove_adapter(self, number: int) -> None:
        self._rank.remove_adapter(number)
        self._workers.remove_adapter(number)

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        source, target = (np.ascontiguousarray(slots, np.int32) for slots in (source, target))
        with self._working():
            self._workers.send(Command(CommandKind.MOVE_SLOTS, group, [source, target]))
            self._rank.move_slots(group, source, target)

    def host_blocks(self, num_bytes: int) -> HostBlocks | None:
        counts = self._rank.host_block_counts(num_bytes)
        if not counts or not all(counts):
            return None
        local = self._rank.make_host_blocks(counts)
        self._workers.make_host_blocks(counts)
        return _RankHostBlocks(local, self)

    def copy_block(self, kind: CommandKind, group: int, source: int, target: int) -> None:
        """Copy a block on the other ranks, in order with launches."""
        with self._working():
            self._workers.send(Command(kind, group, [ints([source, target])]))

    def close(self) -> None:
        self._last_ticket = None  # it refers to this object and to samplers
        if self._number == 0:
            self._workers.close()
            self._rank.close()


class _RankHostBlocks:
    """Host blocks of all ranks: each copies its own heads and layers."""

    def __init__(self, local: HostBlocks, executable: ParallelExecutable) -> None:
        self._local, self._executable = local, executable
        self.num_blocks, self.block_bytes = local.num_blocks, local.block_bytes
        self.block_seconds = local.block_seconds

    def save(self, group: int, block: int, host_block: int) -> None:
        self._local.save(group, block, host_block)  # it may raise MemoryError
        self._executable.copy_block(CommandKind.SAVE_BLOCK, group, block, host_block)

    def load(self, group: int, host_block: int, block: int) -> None:
        self._local.load(group, host_block, block)
        self._executable.copy_block(CommandKind.LOAD_BLOCK, group, host_block, block)


class _Ticket:
    """Results of a launch, or the error that ended its exchanges."""

    def __init__(self, ticket: Ticket, executable: ParallelExecutable, generation: int) -> None:
        self._ticket, self._executable, self._generation = ticket, executable, generation
        self._result: StepResult | None = None

    @property
    def ready(self) -> bool:
        return self._result is not None or self._ticket.ready

    def wait(self) -> StepResult:
        if self._result is None:
            self._result = self._executable.wait_for(self._ticket, self._generation)
        return self._result
