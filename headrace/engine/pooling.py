"""Pools the rows of embedded prompts."""

import numpy as np
from numpy.typing import NDArray

from headrace.logit_ops import LogitOpResult, Pooled
from headrace.request import PoolingParams
from headrace.sampling.pooling import RowSum, mean_vector


class PromptPooling:
    def __init__(self, params: PoolingParams, num_tokens: int) -> None:
        self._params = params
        self._positions = {
            "last": range(num_tokens - 1, num_tokens),
            "mean": range(num_tokens),
            "cls": range(1),
        }[params.pooling]
        self.reset()

    def reset(self) -> None:
        self._num_pooled = 0
        self.state = RowSum()
        self.vector: NDArray[np.float32] | None = None
        """Embedding [dim]; None until all rows have been pooled."""

    def rows(self, computed: int, num_scheduled: int) -> range:
        first = self._positions.start + self._num_pooled
        return range(max(computed, first), min(computed + num_scheduled, self._positions.stop))

    def receive(self, num_rows: int, result: LogitOpResult) -> bool:
        """Add pooled rows; returns whether they are finite."""
        if not isinstance(result, Pooled):
            return False
        self._num_pooled += num_rows
        if self._num_pooled == len(self._positions):
            self.vector = mean_vector(result.total, self._num_pooled, self._params.normalise)
        return True
