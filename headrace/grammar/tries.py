"""Outputs that must be one of many token sequences, such as the items of a recommender.

The sequences are a native tree, so a token costs as much as the tokens that may follow.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import accumulate, chain
from threading import Lock
from typing import Self

import numpy as np

from headrace._native import TokenTrie
from headrace.constraint import Mask, TriePlace
from headrace.errors import ConstraintError, RequestError
from headrace.structured_outputs import StructuredOutputs

_MAX_BYTES = 128 << 20
"""Memory of the cached tries, of which the latest stays in any case."""
_STATE_BYTES = 200
_NOWHERE = -1
"""The node after a token that the trie does not allow."""


class TrieState:
    """A position in a trie, which moves forward and back."""

    def __init__(self, trie: TokenTrie, path: tuple[int, ...] = (0,)) -> None:
        """`path` has the nodes from the beginning on."""
        self._trie = trie
        self._path = path

    @property
    def is_complete(self) -> bool:
        return self._trie.is_complete(self._path[-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of the position: requests share the trie."""
        return _STATE_BYTES

    @property
    def place(self) -> TriePlace:
        return TriePlace(self._trie, self._path[-1])

    def advance(self, token: int) -> None:
        node = self._path[-1]
        if node != _NOWHERE:
            node = self._trie.child(node, token)
        self._path = (*self._path, node)
        if node == _NOWHERE:
            raise ConstraintError(f"no allowed sequence has the token {token} here")

    def rollback(self, num_tokens: int) -> None:
        self._path = self._path[: len(self._path) - num_tokens]

    def fill(self, mask: Mask) -> None:
        self._trie.fill(self._path[-1], mask)

    def clone(self) -> Self:
        return type(self)(self._trie, self._path)


class Tries:
    """Builds and caches tries over the first `vocab_size` tokens, in any thread."""

    def __init__(self, vocab_size: int, encode: Callable[[str], list[int]]) -> None:
        """`encode` gives the tokens of a text within another. It raises RequestError."""
        self._vocab_size = vocab_size
        self._encode = encode
        self._tries = OrderedDict[bytes, TokenTrie]()
        """By digest of the sequences, the least recently used first."""
        self._lock = Lock()

    def state(self, outputs: StructuredOutputs, end_ids: Collection[int]) -> TrieState:
        """The state before the first token. Raises RequestError, which names the field."""
        with self._lock:
            trie = self._tries.get(outputs.digest)
        if trie is None:
            trie = self._build(outputs)
        with self._lock:
            self._tries[outputs.digest] = trie
            self._tries.move_to_end(outputs.digest)
            while len(self._tries) > 1 and self._num_bytes() > _MAX_BYTES:
                self._tries.popitem(last=False)

        ends = [token for token in end_ids if token < self._vocab_size]
        if (token := trie.inner_token(ends)) >= 0:
            raise RequestError(
                f"allowed_sequences has a sequence that continues after the end token {token}; end "
                "the sequence there, or set ignore_eos"
            )
        return TrieState(trie)

    def _num_bytes(self) -> int:
        return sum(trie.num_bytes for trie in self._tries.values())

    def _build(self, outputs: StructuredOutputs) -> TokenTrie:
        sequences = [
            self._tokens(index, item) if isinstance(item, str) else item
            for index, item in enumerate(outputs.allowed_sequences or ())
        ]
        tokens = np.fromiter(chain.from_iterable(sequences), np.int32)
        if (highest := int(tokens.max())) >= self._vocab_size:
            index = next(i for i, sequence in enumerate(sequences) if highest in sequence)
            raise RequestError(
                f"allowed_sequences[{index}] has token {highest:,}, but the vocabulary ends at "
                f"{self._vocab_size - 1:,}"
            )
        starts = np.fromiter(accumulate(map(len, sequences), initial=0), np.int32)
        return TokenTrie(tokens, starts, self._vocab_size)

    def _tokens(self, index: int, text: str) -> list[int]:
        try:
            return self._encode(text)
        except RequestError as error:
            raise RequestError(f"allowed_sequences[{index}]: {error}") from None
