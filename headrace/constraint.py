"""Protocols for constrained outputs: the state of a grammar, and the tokens that may follow.

A mask is a row of bits, `[words]` of uint32: bit i % 32 of word i / 32 allows token i.
"""

from collections.abc import Iterable
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from headrace.batch import DraftTree

Mask = NDArray[np.uint32]  # [words]
Masks = NDArray[np.uint32]  # [rows, words]

MASK_BITS = 32


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // MASK_BITS)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    mask = np.zeros(mask_words(vocab_size), np.uint32)
    ids = np.fromiter(token_ids, np.int64)
    np.bitwise_or.at(
        mask, ids // MASK_BITS, np.left_shift(np.uint32(1), (ids % MASK_BITS).astype(np.uint32))
    )
    return mask


class GrammarState(Protocol):
    """A position in a grammar after some text. It is immutable: a token leads to another state."""

    @property
    def is_complete(self) -> bool: ...

    def after(self, token: int) -> Self: ...

    def fill(self, mask: Mask) -> None:
        """Write the mask of the next token; it allows no id beyond the tokenizer's vocabulary.

        Raises ConstraintError if the computation exceeds its limits.
        """


class Constraint(Protocol):
    """The tokens that may follow in one output, by a grammar or other rules.

    It is immutable: a token leads to another constraint.
    """

    @property
    def changes(self) -> bool:
        """Whether the mask depends on earlier tokens, so it is unknown while they are pending."""

    @property
    def mask(self) -> Mask:
        """The tokens that may come next. It is empty if the output must end here.

        Raises ConstraintError if the computation exceeds its limits.
        """

    @property
    def must_end(self) -> bool:
        """Whether the output is complete and no token can follow."""

    def after(self, token: int) -> Self: ...

    def continuation(self, token: int) -> "Constraint | None":
        """The constraint after a token that the mask allows.

        It is None if the output ends with the token, or has no valid continuation.
        """

    def forced(self, max_tokens: int) -> list[int]:
        """Up to `max_tokens` next tokens at which the mask allows a single token.

        The output continues after the last of them.
        """

    def allowed_nodes(self, draft: DraftTree) -> list[int]:
        """The allowed nodes of a draft, ascending. A node that ends the output has no children."""

    def masks(self, draft: DraftTree) -> Masks:
        """The mask here and after each node of an allowed draft: [1 + nodes, words].

        After a node that ends the output the mask is arbitrary, as its sample is not used.
        """
