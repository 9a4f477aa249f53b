"""An executable whose results arrive one launch late, as those of a GPU do.

An engine that needs a result too early fails the tests with it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from headrace.batch import Ints, KvRows, RaggedBatch
from headrace.logit_ops import LogitOp, StepResult

_T = TypeVar("_T", RaggedBatch, KvRows)


class LateExecutable:
    """Runs a launch when its results are awaited, or when the second launch after it comes.

    Between two launches the engine must work without the results of the first.
    """

    max_in_flight = 2

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.overlaps = 0
        """Launches that came before the previous launch had run."""
        self._late: _LateTicket | None = None

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> "_LateTicket":
        self.overlaps += self._late is not None and not self._late.ready
        self._run_late()
        own = copied(batch)._replace(kv=tuple(map(copied, batch.kv)))
        self._late = _LateTicket(
            lambda: self.inner.launch(own, list(ops), logits=logits, hidden=hidden).wait()
        )
        return self._late

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        self._run_late()
        self.inner.move_slots(group, source, target)

    def host_blocks(self, num_bytes: int) -> "_LateHostBlocks":
        return _LateHostBlocks(self.inner.host_blocks(num_bytes), self._run_late)

    def remove_adapter(self, number: int) -> None:
        self._run_late()
        self.inner.remove_adapter(number)

    def close(self) -> None:
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _run_late(self) -> None:
        if self._late:
            self._late.wait()


class _LateHostBlocks:
    """Copies of host blocks, which are made in their order."""

    def __init__(self, inner: Any, run_late: Callable[[], None]) -> None:
        self._inner = inner
        self._run_late = run_late

    def save(self, group: int, block: int, host_block: int) -> None:
        self._run_late()
        self._inner.save(group, block, host_block)

    def load(self, group: int, host_block: int, block: int) -> None:
        self._run_late()
        self._inner.load(group, host_block, block)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def copied(arrays: _T) -> _T:
    """Return the named tuple with copied arrays."""
    return arrays._replace(
        **{
            name: value.copy()
            for name, value in arrays._asdict().items()
            if isinstance(value, np.ndarray)
        }
    )


class _LateTicket:
    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._run = run
        self._result: StepResult | None = None

    @property
    def ready(self) -> bool:
        return self._result is not None

    def wait(self) -> StepResult:
        if self._result is None:
            result = self._run()
            self._result = StepResult(
                result.values, *(None if rows is None else rows.copy() for rows in result[1:])
            )
        return self._result
