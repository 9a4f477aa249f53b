"""What an acceptance method is, and the state of one sequence while a method in Python goes down
its draft tree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from headrace._native import Pool
from headrace.batch import TokenLogprobs
from headrace.constraint import Masks
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling.sampler import NativeDraw, Sampler

Logits = NDArray[np.float32]  # [rows, vocab]
Verifier = Callable[[Sequence[SampleOp], Logits, Pool], list[SampleResult | None]]
"""An acceptance method: the result of each draw by its rows of logits, with the threads of a pool.
"""


@dataclass(slots=True, eq=False)
class Verification:
    """The state of a `SampleOp` while it goes down its draft tree."""

    draw: SampleOp
    node: int = -1
    """The last accepted node; -1: none yet."""
    tokens: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def sampler(self) -> Sampler:
        """The native sampler of the sequence."""
        return cast(Sampler, self.draw.sampler)

    @property
    def position(self) -> int:
        """Position of the next token in the sequence."""
        return self.draw.position + len(self.tokens)

    @property
    def row(self) -> int:
        """Index among the logit rows of the row that the next token is drawn from."""
        return self.draw.row + 1 + self.node

    @property
    def masks(self) -> Masks | None:  # [1, words]
        """The tokens that may be drawn from that row."""
        return masks_behind(self.draw, self.node)

    @property
    def drawn(self) -> SampleResult:
        """The result."""
        return SampleResult(self.tokens, self.path, self.logprobs)

    def take(self, drawn: NativeDraw) -> bool:
        """Add a token; go to the first child node that has it, and return whether there is one."""
        token, logprobs = drawn
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(TokenLogprobs(*logprobs))
        draft = self.draw.draft
        for child, step in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            if step == (self.node, token):
                self.node = child
                self.path.append(child)
                return True
        return False


def masks_behind(draw: SampleOp, node: int) -> Masks | None:  # [1, words]
    """The tokens that may be drawn behind a draft node, or, for -1, behind the last known token;
    None: all may.
    """
    return None if draw.masks is None else draw.masks[node + 1 : node + 2]
