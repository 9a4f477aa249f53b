"""Logit ops over the logits of some tokens of a vocabulary."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable
from headrace.batch import RaggedBatch
from headrace.logit_ops import LogitOp, StepResult
from headrace.sampling.host import run_logit_ops

_NEVER = np.float32(-1e9)
"""Logit of tokens without one; finite, because samplers check logits."""


class MappedLogits:
    """Runs a program whose logit i belongs to token `tokens[i]`; None: to token i."""

    def __init__(
        self, executable: Executable, tokens: NDArray[np.int32] | None, vocab_size: int
    ) -> None:
        self.executable = executable
        self._tokens = tokens
        self._vocab_size = vocab_size

    def launch(self, batch: RaggedBatch, ops: Sequence[LogitOp]) -> StepResult:
        """Run one forward with the ops; its hidden rows are valid until the next launch."""
        if self._tokens is None or not ops:
            return self.executable.launch(batch, ops, hidden=True).wait()
        result = self.executable.launch(batch, logits=True, hidden=True).wait()
        assert result.logits is not None
        logits = np.full((len(result.logits), self._vocab_size), _NEVER)
        logits[:, self._tokens] = result.logits
        return StepResult(run_logit_ops(ops, logits), hidden=result.hidden)
