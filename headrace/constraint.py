"""Protocols for constrained outputs: the state of a grammar, and the tokens that may follow.

A mask is a row of bits, `[words]` of uint32: bit i % 32 of word i / 32 allows token i.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, Self

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


class Trie(Protocol):
    """The token sequences of which an output must be one, as a tree. Node 0 is the beginning."""

    def is_complete(self, node: int, /) -> bool:
        """Return whether a sequence ends at a node."""

    def is_leaf(self, node: int, /) -> bool:
        """Return whether no token follows a node."""


class TriePlace(NamedTuple):
    """A node of a trie. End tokens may follow the node, if a sequence ends there."""

    trie: Trie
    node: int


class GrammarState(Protocol):
    """A position in a grammar after some tokens, which moves forward and back."""

    @property
    def is_complete(self) -> bool: ...

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of memory."""

    @property
    def place(self) -> TriePlace | None:
        """The place in a trie, whose tokens alone may follow; None for other grammars."""

    def advance(self, token: int) -> None:
        """Move after a token. Raises ConstraintError if the grammar does not allow the token."""

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens, and with them an error that they caused."""

    def fill(self, mask: Mask) -> None:
        """Write the mask of the next token; it allows no id beyond the tokenizer's vocabulary.

        Raises ConstraintError if the computation exceeds its limits.
        """

    def clone(self) -> Self: ...


class Constraint(Protocol):
    """The tokens that may follow in one output, by a grammar or other rules.

    It moves with its output, token by token. Drafts are tried and taken back.
    """

    @property
    def changes(self) -> bool:
        """Whether the mask depends on earlier tokens, so it is unknown while they are pending."""

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of memory."""

    @property
    def mask(self) -> Mask:
        """The tokens that may come next. It is empty if the output must end here.

        Raises ConstraintError if the computation exceeds its limits.
        """

    @property
    def must_end(self) -> bool:
        """Whether the output is complete and no token can follow."""

    @property
    def place(self) -> TriePlace | None:
        """The place in a trie that alone decides about the next token; None: see `mask`."""

    def push(self, token: int) -> None:
        """Move after a token of the output. Raises ConstraintError if it is not allowed."""

    def clone(self) -> Self: ...

    def mask_after(self, draft: Sequence[int]) -> Mask | None:
        """The tokens that may come after a draft, a run of allowed tokens.

        None if the output ends with the draft, or has no valid continuation.
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


def allows(mask: Mask, token: int) -> bool:
    return bool(mask[token // MASK_BITS] >> np.uint32(token % MASK_BITS) & 1)
