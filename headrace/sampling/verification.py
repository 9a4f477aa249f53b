"""The protocol of acceptance methods."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from headrace._native import Pool
from headrace.batch import TokenLogprobs
from headrace.constraint import Masks
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling.sampler import NativeSample, Sampler

Logits = NDArray[np.float32]  # [rows, vocab]
Verifier = Callable[[Sequence[SampleOp], Logits, Pool], list[SampleResult | None]]
"""An acceptance method: the result of each op, or None for logits that are not finite."""


@dataclass(slots=True, eq=False)
class Verification:
    """The state of a `SampleOp` on its way down the draft tree."""

    op: SampleOp
    node: int = -1
    """Last accepted; -1 before the first."""
    tokens: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def sampler(self) -> Sampler:
        return cast(Sampler, self.op.sampler)

    @property
    def position(self) -> int:
        return self.op.position + len(self.tokens)

    @property
    def row(self) -> int:
        return self.op.row + 1 + self.node

    @property
    def masks(self) -> Masks | None:  # [1, words]
        return masks_after(self.op, self.node)

    @property
    def result(self) -> SampleResult:
        return SampleResult(self.tokens, self.path, self.logprobs)

    def take(self, sample: NativeSample) -> bool:
        """Add a token and go to the first child with it; returns whether there is a child."""
        token, logprobs = sample
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(TokenLogprobs(*logprobs))
        draft = self.op.draft
        for child, edge in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            if edge == (self.node, token):
                self.node = child
                self.path.append(child)
                return True
        return False


def masks_after(op: SampleOp, node: int) -> Masks | None:  # [1, words]
    """The tokens that may follow a draft node, or the last known token for -1."""
    return None if op.masks is None else op.masks[node + 1 : node + 2]
