"""A rank on the cpu backend."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from headrace.backend.cpu.executable import CpuExecutable, instructions
from headrace.backend.variants import GatheredRows, Rows, result_of
from headrace.batch import Ints, RaggedBatch
from headrace.logit_ops import LogitOp, StepResult
from headrace.parallel.collectives import Collectives, Transport
from headrace.parallel.rank import Rank, RankConfig
from headrace.program.adapter import Adapter
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.sampling.host import run_logit_ops


class CpuRank(Rank[CpuExecutable]):
    """Runs its part of a step at once. In a pipeline rank 0 runs it when the result is waited for,
    so that it can command the next step to the first stage before.
    """

    def __init__(
        self,
        config: RankConfig,
        program: Program,
        tensors: Mapping[str, StoredTensor],
        transport: Transport,
    ) -> None:
        self._collectives = Collectives(transport)
        self._late: deque[_LateStep] = deque()
        self.max_in_flight = config.mesh.pipeline
        super().__init__(config, program, tensors)

    def _compile(self, share: Program, weights: Mapping[str, StoredTensor]) -> CpuExecutable:
        executable = CpuExecutable(
            share,
            weights,
            self.config.mesh.kv(self.config.kv, self.config.rank),
            self.config.threads,
            instructions(),
            activations=self.config.activations,
            process_group=self._collectives,
        )
        executable.wait_for_weights()  # so that an error comes before the ranks connect
        return executable

    def launch(
        self,
        number: int,
        batch: RaggedBatch,
        ops: Sequence[LogitOp],
        *,
        logits: bool,
        hidden: bool,
    ) -> "_LateStep":
        def run() -> StepResult:
            rows = self.rows(number, batch)
            assert rows.logits is not None, "rank 0 has the last stage"
            values = run_logit_ops(ops, rows.logits, rows.pooled, self.executables[number].pool)
            result = result_of(values, rows, logits=logits, hidden=hidden)
            if self.max_in_flight == 1:
                return result
            # The next step may run before these rows are read.
            return StepResult(
                values=values,
                logits=_copy(result.logits),
                hidden=_copy(result.hidden),
                taps=_copy(result.taps),
            )

        step = _LateStep(run, self._late)
        if self.max_in_flight == 1:
            step.wait()
        return step

    def run(self, number: int, batch: RaggedBatch) -> None:
        self.rows(number, batch)

    def rows(self, number: int, batch: RaggedBatch) -> GatheredRows:
        """Run a program; its rows are valid until the next run."""
        start, wait_before = monotonic(), self._collectives.wait_seconds
        rows = self.executables[number].run_variants(batch)
        self._record_time(start + self._collectives.wait_seconds - wait_before)
        return rows

    def finish_late(self) -> None:
        """Run the steps that are not waited for yet: later calls must not overtake them."""
        while self._late:
            self._late[-1].wait()

    def forget_steps(self) -> None:
        self._late.clear()

    def add_adapter(self, adapter: Adapter) -> int:
        self.finish_late()
        return super().add_adapter(adapter)

    def remove_adapter(self, number: int) -> None:
        self.finish_late()
        super().remove_adapter(number)

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        self.finish_late()
        super().move_slots(group, source, target)


class _LateStep:
    """Ticket of a step, which runs at the first wait for it or for a later one."""

    def __init__(self, run: Callable[[], StepResult], late: "deque[_LateStep]") -> None:
        self._run, self._late = run, late
        self._result: StepResult | None = None
        late.append(self)

    @property
    def ready(self) -> bool:
        return self._result is not None

    def wait(self) -> StepResult:
        while self._result is None:
            first = self._late.popleft()
            first._result = first._run()
        return self._result


def _copy(rows: Rows | None) -> Rows | None:
    return None if rows is None else rows.copy()
