"""Logit ops over the logits of some tokens of a vocabulary."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.backend import Executable
from headrace.batch import RaggedBatch
from headrace.logit_ops import Expand, StepResult
from headrace.sampling.host import run_logit_ops


class MappedLogits:
    """Runs a program whose logit i belongs to token `tokens[i]`; -1: to none; None: to token i."""

    def __init__(
        self, executable: Executable, tokens: NDArray[np.int32] | None, vocab_size: int
    ) -> None:
        self.executable = executable
        self._map = self._order = None
        if tokens is not None:
            order = np.argsort(tokens)[np.count_nonzero(tokens < 0) :]
            self._map = _native.TokenMap(tokens[order].tolist(), vocab_size)
            is_whole = len(order) == len(tokens) and (np.diff(tokens) > 0).all()
            self._order = None if is_whole else order

    def launch(
        self, batch: RaggedBatch, ops: Sequence[Expand], own_ops: Sequence[Expand] = ()
    ) -> StepResult:
        """Run one forward with the ops; its hidden rows are valid until the next launch.

        `own_ops` read the program's own logits, and their results come after those of `ops`.
        """
        if self._map is not None:
            ops = [op._replace(tokens=self._map) for op in ops]
        if self._order is None or not ops:
            return self.executable.launch(batch, [*ops, *own_ops], hidden=True).wait()
        result = self.executable.launch(batch, logits=True, hidden=True).wait()
        assert result.logits is not None
        logits = result.logits.take(self._order, axis=1)
        values = run_logit_ops(ops, logits)
        if own_ops:
            values += run_logit_ops(own_ops, result.logits.copy())
        return StepResult(values, hidden=result.hidden)
