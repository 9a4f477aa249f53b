"""Exact verification: the acceptor that is lossless for any draft tree, any sampler and any penalty."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.accept.sampler import Drawn, Pool, Sampler, draw_all
from headrace.batch import Commit, DraftTree, TokenLogprobs


@dataclass(slots=True, eq=False)
class Verification:
    """A sequence that draws, on its way down its draft tree."""

    commit: Commit
    """Grows by what is drawn."""
    sampler: Sampler
    draft: DraftTree
    row: int
    """Where the logits of the last scheduled row are; those of the nodes follow it."""
    position: int
    """Of the next token."""
    num_logprobs: int
    """-1: no log-probabilities."""
    node: int = -1

    def take(self, drawn: Drawn) -> bool:
        """Add a token; move to the child that carries it, and return whether there is one."""
        token, logprobs = drawn
        self.commit.tokens.append(token)
        if logprobs is not None:
            self.commit.logprobs.append(TokenLogprobs(*logprobs))
        for child, step in enumerate(zip(self.draft.parents, self.draft.tokens, strict=True)):
            if step == (self.node, token):  # of equal siblings the first will do
                self.node = child
                self.position += 1
                self.commit.path.append(child)
                return True
        return False


Rule = Callable[[list[Verification], NDArray[np.float32], Pool], set[int]]
"""What becomes of drafts: grows the commits by those that survive and the token that follows them, by `logits` [rows, vocab].

Returns the sources of those that met logits which are not finite; their commits mean nothing.
"""


def verify_exact(verifications: list[Verification], logits: NDArray[np.float32], pool: Pool) -> set[int]:
    """Draw the next token of each; where a child in its tree carries it, move there and draw the next; else stop.

    `logits` [rows, vocab]. A draw depends on the tokens before it and on the noise of its position only, so the tokens are those
    of plain decoding whatever the tree. The draws of all sequences at one depth are one native call, shared by the threads of the
    pool. Returns the sources of those that met logits which are not finite; their commits mean nothing.
    """
    failed: set[int] = set()
    while verifications:
        draws = [(d.sampler, d.row + 1 + d.node, d.position, d.num_logprobs) for d in verifications]
        drawn = list(zip(verifications, draw_all(pool, logits, draws), strict=True))
        failed.update(verification.commit.source for verification, result in drawn if result is None)
        verifications = [verification for verification, result in drawn if result is not None and verification.take(result)]
    return failed
