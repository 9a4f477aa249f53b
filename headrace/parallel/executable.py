"""A model on several ranks as an executable: rank 0 runs here and commands the others."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from headrace.backend import HostBlocks
from headrace.backend.cpu.executable import CpuExecutable
from headrace.backend.variants import GatheredRows
from headrace.batch import Ints, RaggedBatch, StepTimes
from headrace.config import KvConfig
from headrace.logit_ops import LogitOp, LogitOpResult, StepResult
from headrace.parallel.commands import Command, CommandKind, adapter_to_arrays, batch_to_arrays
from headrace.parallel.rank import Rank
from headrace.parallel.transport import GlooTransport
from headrace.parallel.workers import Workers
from headrace.program.adapter import Adapter
from headrace.program.kv import KvGroup
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.sampling.host import run_logit_ops, tokens_of
from headrace.stats import StageStep

Floats = NDArray[np.float32]


class _Ticket:
    def __init__(self, wait: Callable[[], StepResult]) -> None:
        self._wait = wait
        self._result: StepResult | None = None

    @property
    def ready(self) -> bool:
        return self._result is not None

    def wait(self) -> StepResult:
        if self._result is None:
            self._result = self._wait()
        return self._result


class ParallelExecutable:
    """The program of all ranks.

    A launch raises RankLostError for a lost rank; the next restarts the ranks without KV. An error
    in the work of a rank that lives ends the launch alone.
    """

    def __init__(
        self, rank: Rank, program: Program, transport: GlooTransport, workers: Workers
    ) -> None:
        self._rank, self._transport, self._workers = rank, transport, workers
        self.max_in_flight = rank.config.mesh.pipeline
        self._number = 0
        self._last_ticket: _Ticket | None = None
        self._set_program(program)

    def _set_program(self, program: Program) -> None:
        self._local = self._rank.executables[self._number]
        self.program = self._local.program
        self.kv_groups: tuple[KvGroup, ...] = program.kv_groups
        self._whole_program = program

    def connect(self) -> None:
        try:
            self._workers.connect()
        except BaseException:
            self.close()
            raise

    def prepare(self, max_rows: int, max_logit_rows: int) -> None: ...

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> "_Ticket":
        values: Sequence[LogitOpResult] = ()
        if self._last_ticket and batch.token_source is not None:
            values = self._last_ticket.wait().values
        batch = batch._replace(tokens=tokens_of(batch, values), token_source=None)
        with self._workers.working():
            self._workers.send(Command(CommandKind.RUN, self._number, batch_to_arrays(batch)))
            local = self._rank.run(self._number, batch)
        generation = self._workers.generation

        def wait() -> StepResult:
            with self._workers.working(generation):
                rows = self._results(batch, local)
            assert rows.logits is not None
            values = run_logit_ops(ops, rows.logits, rows.pooled, self._local.pool)
            return StepResult(
                values, rows.logits if logits else None, rows.hidden if hidden else None
            )

        self._last_ticket = _Ticket(wait)
        if self.max_in_flight == 1:
            # The results lie in buffers that the next launch overwrites.
            self._last_ticket.wait()
        return self._last_ticket

    def _results(self, batch: RaggedBatch, local: GatheredRows) -> GatheredRows:
        """`local`: rows of rank 0, the results if the model has one stage."""
        if self._rank.config.mesh.pipeline == 1:
            return local
        program, num_rows = self._whole_program, len(batch.logit_rows)
        assert program.logits
        logits = self._receive(num_rows, program.logits.width)
        hidden = self._receive(num_rows, program.hidden.width) if program.hidden else None
        pooled = None
        if program.pooled and batch.pooled_rows is not None:
            pooled = self._receive(len(batch.pooled_rows), program.pooled.width)
        return GatheredRows(logits, hidden, pooled)

    def _receive(self, rows: int, width: int) -> Floats:
        out = np.empty((rows, width), np.float32)
        if rows:
            self._transport.receive_from(out, self._rank.config.mesh.first_of_last_stage)
        return out

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> "ParallelExecutable | CpuExecutable":
        """Attach a program. A program with its own KV runs on rank 0 alone."""
        attached = self._rank.attach(program, weights, kv)
        if kv is not None:
            return attached
        other = copy(self)
        other._number = len(self._rank.executables) - 1
        other._set_program(program)
        return other

    def profile(self, batch: RaggedBatch) -> StepTimes:
        with self._workers.working():
            self._workers.send(Command(CommandKind.RUN, self._number, batch_to_arrays(batch)))
            times = self._local.profile(batch)
            self._results(batch, GatheredRows(None, None, None))
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
        return self._local.expert_loads()

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
        with self._workers.working():
            self._workers.send(Command(CommandKind.MOVE_SLOTS, group, [source, target]))
            self._local.move_slots(group, source, target)

    def host_blocks(self, num_bytes: int) -> HostBlocks | None:
        return None

    def close(self) -> None:
        self._last_ticket = None  # it refers to this object and to samplers
        if self._number == 0:
            self._workers.close()
            self._rank.close()
