"""The vocabulary of a drafter that has logits for some tokens only."""

from collections.abc import Sequence
from math import inf
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace._native import TokenMap
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.kernels.gather import spread_columns
from headrace.backend.cuda.launch import Launch
from headrace.logit_ops import Expand, LogitOp, LogitOpResult
from headrace.sampling.host import run_logit_ops


class DraftVocabulary:
    """Logit i of a drafter belongs to token `tokens[i]` of `size` tokens."""

    def __init__(self, tokens: NDArray[np.int32], size: int) -> None:
        self.size = size
        self._order = np.argsort(tokens)
        self._map = TokenMap(tokens[self._order].tolist(), size)
        columns = np.full(size, -1, np.int32)
        columns[tokens] = np.arange(len(tokens), dtype=np.int32)
        self._columns = torch.from_numpy(columns).to(DEVICE)

    def spread(self, out: torch.Tensor, logits: torch.Tensor) -> Launch:
        """Write logits [rows, tokens] to rows of the whole vocabulary, `out` [rows, size].

        Other tokens have a logit of -inf, so that no sample has them.
        """
        return spread_columns(out, logits, self._columns, -inf)

    def run_on_host(
        self, ops: Sequence[LogitOp], logits: NDArray[np.float32]
    ) -> list[LogitOpResult]:
        """Run draft ops on the host, with logits [rows, tokens]."""
        expands = [cast(Expand, op)._replace(tokens=self._map) for op in ops]
        return run_logit_ops(expands, logits[:, self._order])
