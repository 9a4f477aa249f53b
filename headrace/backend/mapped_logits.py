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
    """Runs a program whose logit i belongs to token `tokens[i]`; None: to token i."""

    def __init__(
        self, executable: Executable, tokens: NDArray[np.int32] | None, vocab_size: int
    ) -> None:
        self.executable = executable
        self._map = self._order = None
        if tokens is not None:
            order = np.argsort(tokens)
            self._map = _native.TokenMap(tokens[order].tolist(), vocab_size)
            self._order = None if (np.diff(tokens) > 0).all() else order

    def launch(self, batch: RaggedBatch, ops: Sequence[Expand]) -> StepResult:
        """Run one forward with the ops; its hidden rows are valid until the next launch."""
        if self._map is not None:
            ops = [op._replace(tokens=self._map) for op in ops]
        if self._order is None or not ops:
            return self.executable.launch(batch, ops, hidden=True).wait()
        result = self.executable.launch(batch, logits=True, hidden=True).wait()
        assert result.logits is not None
        logits = result.logits[:, self._order]
        return StepResult(run_logit_ops(ops, logits), hidden=result.hidden)
