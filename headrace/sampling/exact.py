"""Exact verification: draw the next token, go to the draft node that has it, and stop where there is none.

It is lossless for any draft tree, any sampler and any penalty: a draw depends only on the tokens before it and on the noise of its
position, so the tokens are those of plain decoding for every tree.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace._native import Pool
from headrace.batch import TokenLogprobs
from headrace.logit_ops import Draw, Drawn
from headrace.sampling.sampler import NativeDraw, Sampler, draw_all


@dataclass(slots=True, eq=False)
class Verification:
    """The state of a `Draw` while it goes down its draft tree."""

    draw: Draw
    sampler: Sampler
    position: int
    """Position of the next token in the sequence."""
    node: int = -1
    """The last accepted node; -1: none yet."""
    failed: bool = False
    """Whether a row of logits was not finite."""
    tokens: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def row(self) -> int:
        """Index among the logit rows of the row that the next token is drawn from."""
        return self.draw.row + 1 + self.node

    def take(self, drawn: NativeDraw) -> bool:
        """Add a token; go to the child node that has it, and return whether there is one."""
        token, logprobs = drawn
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(TokenLogprobs(*logprobs))
        draft = self.draw.draft
        for child, step in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            if step == (self.node, token):  # the first of equal siblings
                self.node = child
                self.position += 1
                self.path.append(child)
                return True
        return False

    @property
    def drawn(self) -> Drawn | None:
        """The result; None where a row of logits was not finite."""
        return None if self.failed else Drawn(self.tokens, self.path, self.logprobs)


Verifier = Callable[[list[Verification], NDArray[np.float32], Pool], None]
"""An acceptance method: completes verifications by `logits` [rows, vocab], with the threads of a pool."""


def verify_exact(verifications: list[Verification], logits: NDArray[np.float32], pool: Pool) -> None:
    """Complete verifications by draws alone. All draws at one depth are one native call, split over the threads of the pool."""
    while verifications:
        drawn = draw_all(pool, logits, [(v.sampler, v.row, v.position, v.draw.num_logprobs) for v in verifications])
        for verification, result in zip(verifications, drawn, strict=True):
            verification.failed = result is None
        verifications = [v for v, result in zip(verifications, drawn, strict=True) if result is not None and v.take(result)]
