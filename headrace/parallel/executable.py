"""A model on several ranks, as an executable: rank 0 is here, and tells the others what to run."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from headrace.backend import HostBlocks
from headrace.backend.cpu.executable import CpuExecutable
from headrace.batch import Ints, RaggedBatch, StepTimes
from headrace.config import KvConfig
from headrace.logit_ops import LogitOp, StepResult
from headrace.parallel.commands import Command, Kind, adapter_arrays, batch_arrays
from headrace.parallel.rank import Rank
from headrace.parallel.transport import GlooCarrier
from headrace.parallel.workers import Followers
from headrace.program.adapter import Adapter
from headrace.program.kv import KvGroup
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.sampling.host import run_logit_ops, tokens_of
from headrace.stats import StageStep

Floats = NDArray[np.float32]


class _Ticket:
    """Stands for the results of a launch, which the last stage sends; they are received in the
    order of the launches.
    """

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
    """The program of all ranks. Where one is lost a launch raises RankLostError; the next one
    starts the others again.

    What they kept is gone then: the engine computes it again.
    """

    def __init__(
        self, rank: Rank, program: Program, carrier: GlooCarrier, followers: Followers
    ) -> None:
        self._rank, self._carrier, self._followers = rank, carrier, followers
        self.max_in_flight = rank.config.mesh.pipeline
        self._number = 0
        self._last: _Ticket | None = None
        self._takes(program)

    def _takes(self, program: Program) -> None:
        self._local = self._rank.executables[self._number]
        self.program = self._local.program
        self.kv_groups: tuple[KvGroup, ...] = program.kv_groups
        self._whole = program

    def connect(self) -> None:
        """Wait until all ranks have their shares, and link them. Raises RankLostError, with what it
        says, where one has not.
        """
        try:
            self._followers.join()
        except BaseException:
            self.close()
            raise

    def prepare(self, max_rows: int, max_logit_rows: int) -> None:
        """Nothing is made ahead."""

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> "_Ticket":
        values = self._last.wait().values if self._last and batch.token_source is not None else []
        batch = batch._replace(tokens=tokens_of(batch, values), token_source=None)
        with self._followers.at_work():
            self._followers.send(Command(Kind.RUN, self._number, batch_arrays(batch)))
            self._rank.run(self._number, batch)
        generation = self._followers.generation

        def wait() -> StepResult:
            with self._followers.at_work(generation):
                rows, kept, pooled = self._results_of(batch)
            values = run_logit_ops(ops, rows, pooled, self._local.pool)
            return StepResult(values, rows if logits else None, kept if hidden else None)

        self._last = _Ticket(wait)
        if self.max_in_flight == 1:
            self._last.wait()  # what it reads is there until the next launch
        return self._last

    def _results_of(self, batch: RaggedBatch) -> tuple[Floats, Floats | None, Floats | None]:
        """The logits, hidden and pooled rows of a batch; they come from the last stage."""
        if self._rank.config.mesh.pipeline == 1:
            logits = self._local.logits(batch)
            assert logits is not None
            return logits, self._local.hidden(batch), self._local.pooled(batch)
        pooled = 0 if batch.pooled_rows is None else len(batch.pooled_rows)
        program, rows = self._whole, len(batch.logit_rows)
        assert program.logits
        logits = self._received(rows, program.logits.width)
        hidden = self._received(rows, program.hidden.width) if program.hidden else None
        return (
            logits,
            hidden,
            self._received(pooled, program.pooled.width)
            if program.pooled and batch.pooled_rows is not None
            else None,
        )

    def _received(self, rows: int, width: int) -> Floats:
        out = np.empty((rows, width), np.float32)
        if rows:
            self._carrier.receive_from(out, self._rank.config.mesh.first_of_last_stage)
        return out

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> "ParallelExecutable | CpuExecutable":
        """A program with KV of its own runs on rank 0 alone: a draft model is small. The followers
        attach the others as well, by themselves, in the same order.
        """
        attached = self._rank.attach(program, weights, kv)
        if kv is not None:
            return attached
        other = copy(self)
        other._number = len(self._rank.executables) - 1
        other._takes(program)
        return other

    def profile(self, batch: RaggedBatch) -> StepTimes:
        """The times of rank 0."""
        with self._followers.at_work():
            self._followers.send(Command(Kind.RUN, self._number, batch_arrays(batch)))
            times = self._local.profile(batch)
            self._results_of(batch)
        return times

    def stage_steps(self) -> list[StageStep]:
        """The last steps of all ranks, of which none is under way; their times can be compared
        where ranks are on one machine.
        """
        with self._followers.at_work():
            ranks = {0: self._rank.stage_steps()} | self._followers.stage_steps()
        return [
            StageStep(rank, number, *map(float, times))
            for rank, steps in ranks.items()
            for number, times in enumerate(steps)
        ]

    def expert_loads(self) -> NDArray[np.int64]:
        """Those of the experts in the stage of rank 0."""
        return self._local.expert_loads()

    def add_adapter(self, adapter: Adapter) -> int:
        number = self._rank.add_adapter(adapter)
        self._followers.remember(Command(Kind.ADD_ADAPTER, number, adapter_arrays(adapter)))
        return number

    def remove_adapter(self, number: int) -> None:
        self._rank.remove_adapter(number)
        self._followers.remember(Command(Kind.REMOVE_ADAPTER, number))

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        source, target = (np.ascontiguousarray(slots, np.int32) for slots in (source, target))
        with self._followers.at_work():
            self._followers.send(Command(Kind.MOVE_SLOTS, group, [source, target]))
            self._local.move_slots(group, source, target)

    def host_blocks(self, num_bytes: int) -> HostBlocks | None:
        """None: its KV is in the host's memory."""
        return None

    def close(self) -> None:
        self._last = None  # which refers to this, and to the samplers of its draws
        if self._number == 0:
            self._followers.close()
            self._rank.close()
