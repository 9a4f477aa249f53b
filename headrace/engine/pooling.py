"""Prompts that are embedded: which of their rows are pooled, and what has been pooled of them."""

import numpy as np
from numpy.typing import NDArray

from headrace.logit_ops import LogitOpResult, Pooled
from headrace.request import PoolingParams
from headrace.sampling.pooling import RowSum, mean_vector


class PromptPooling:
    """The pooling of a prompt of `num_tokens` tokens, over all its steps."""

    def __init__(self, params: PoolingParams, num_tokens: int) -> None:
        self._params = params
        self._positions = {
            "last": range(num_tokens - 1, num_tokens),
            "mean": range(num_tokens),
            "cls": range(1),
        }[params.pooling]
        self.begin()

    def begin(self) -> None:
        """Forget what has been pooled."""
        self._num_pooled = 0
        self.state = RowSum()
        self.vector: NDArray[np.float32] | None = None
        """What the prompt becomes, [dim], once all its rows have been pooled."""

    def rows(self, computed: int, num_scheduled: int) -> range:
        """Positions of the next `num_scheduled` rows that are still to be pooled, when `computed`
        tokens have KV.
        """
        first = self._positions.start + self._num_pooled
        return range(max(computed, first), min(computed + num_scheduled, self._positions.stop))

    def receive(self, num_rows: int, result: LogitOpResult) -> bool:
        """Take over what a step has pooled; whether it is finite."""
        if not isinstance(result, Pooled):
            return False
        self._num_pooled += num_rows
        if self._num_pooled == len(self._positions):
            self.vector = mean_vector(result.total, self._num_pooled, self._params.normalise)
        return True
