"""Draw, then descend: the acceptor that is lossless for any guess tree, any sampler and any penalty."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.batch import Commit, Guess, TokenLogprobs

Drawn = tuple[int, tuple[float, int, list[int], list[float]] | None]


class Draws(Protocol):
    """The sampling state of a branch, as far as an acceptor uses it."""

    def draw(self, logits: NDArray[np.float32], position: int, num_logprobs: int) -> Drawn:
        """The token at `position`, which becomes part of the state, and its log-probabilities unless num_logprobs < 0."""


def descend(source: int, sampler: Draws, guess: Guess, logits: NDArray[np.float32], position: int, num_logprobs: int) -> Commit:
    """Draw the token at `position`; where a child in the tree carries it, move there and draw the next; else stop.

    `logits` [1 + nodes, vocab]: the last forced row's, then each node's. A draw depends on the tokens before it and on the
    noise of its position only, so the tokens are those of plain decoding whatever the tree. Raises NonFiniteLogitsError.
    """
    children: dict[tuple[int, int], int] = {}
    for child, step in enumerate(zip(guess.parents, guess.tokens, strict=True)):
        children.setdefault(step, child)  # of equal siblings the first will do
    commit = Commit(source, [], [], [])
    node = -1
    while True:
        token, logprobs = sampler.draw(logits[1 + node], position + len(commit.path), num_logprobs)
        commit.tokens.append(token)
        if logprobs is not None:
            commit.logprobs.append(TokenLogprobs(*logprobs))
        if (node, token) not in children:
            return commit
        node = children[node, token]
        commit.path.append(node)
