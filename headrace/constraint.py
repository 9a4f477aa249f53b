"""The protocols of what steers an output: where it is in a grammar, and which tokens may follow.

A mask is a row of bits, `[words]` of uint32: bit i % 32 of word i / 32 is set where token i may be
drawn.
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
    """Words of a mask over so many tokens."""
    return -(-vocab_size // MASK_BITS)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """The mask that allows these tokens alone."""
    mask = np.zeros(mask_words(vocab_size), np.uint32)
    ids = np.fromiter(token_ids, np.int64)
    np.bitwise_or.at(
        mask, ids // MASK_BITS, np.left_shift(np.uint32(1), (ids % MASK_BITS).astype(np.uint32))
    )
    return mask


class GrammarState(Protocol):
    """A place in a grammar, after some text of it. It never changes, so it needs no copies: a token
    leads to another place.
    """

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""

    def after(self, token: int) -> Self:
        """The place behind a token that may follow."""

    def fill(self, mask: Mask) -> None:
        """Write which tokens may follow; none beyond the vocabulary of the tokenizer ever do.
        Raises ConstraintError where it would take too long to find out.
        """


class Constraint(Protocol):
    """What may follow in one output, by a grammar or other rules. It never changes: a token leads
    to the constraint behind it.
    """

    @property
    def changes(self) -> bool:
        """Whether the mask depends on the tokens before it, so that it is not there until these are
        known.
        """

    @property
    def mask(self) -> Mask:
        """The tokens that may be drawn next. Raises ConstraintError where it cannot be computed; it
        may be empty.
        """

    @property
    def must_end(self) -> bool:
        """Whether the output is complete as it is, and no token can follow."""

    def after(self, token: int) -> Self:
        """The constraint behind a token, which the mask allows."""

    def beyond(self, token: int) -> "Constraint | None":
        """The same; None where the output ends with the token, or cannot go on behind it."""

    def forced(self, max_tokens: int) -> list[int]:
        """Return up to `max_tokens` next tokens that the masks force, as they allow one token each.
        The output continues after them.
        """

    def permitted(self, draft: DraftTree) -> list[int]:
        """The nodes of a draft, ascending, that may be drawn: none behind a token that ends the
        output.
        """

    def masks(self, draft: DraftTree) -> Masks:
        """The mask here, and behind each node of a draft, all of which are permitted: [1 + nodes,
        words].

        Behind a node that ends the output it is any, as what is drawn there does not count.
        """
