"""Grammar, allowed tokens and bad words of an output as one mask."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import field
from functools import cached_property, partial
from itertools import product

import numpy as np

from headrace.batch import DraftTree
from headrace.constraint import (
    MASK_BITS,
    GrammarState,
    Mask,
    Masks,
    TriePlace,
    allows,
    mask_of,
)
from headrace.errors import ConstraintError, RequestError
from headrace.grammar.grammars import Grammars, Vocabulary
from headrace.grammar.thinking import Thinking, thinking
from headrace.grammar.tries import Tries
from headrace.record import frozen
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputs


@frozen
class Rules:
    """Rules for all outputs of a request."""

    allowed: Mask
    ends: Mask
    """Tokens that end an output whose text completes its grammar."""
    end_ids: frozenset[int]
    min_tokens: int
    vocab_size: int
    bad_words: list[tuple[int, ...]] = field(default_factory=list)
    """Forbidden runs of two or more tokens."""

    @cached_property
    def allows_all(self) -> bool:
        """Whether every token is allowed, apart from bad words of several tokens."""
        return int(np.bitwise_count(self.allowed).sum()) == self.vocab_size

    @cached_property
    def num_recent(self) -> int:
        return max((len(word) - 1 for word in self.bad_words), default=0)


_Path = tuple[int, ...]
"""Draft tokens after the output."""


class OutputConstraint:
    """The `Constraint` of one output.

    The grammar's state follows the output and moves along its drafts: memory grows only by what
    the state keeps of each token, and a token costs the same at any length.
    """

    def __init__(
        self, rules: Rules, state: GrammarState | None, thinking: Thinking | None = None
    ) -> None:
        self._rules = rules
        self._state = state
        self._thinking = thinking
        """None: the reasoning has ended, or has no limit."""
        self._length = 0
        self._recent: _Path = ()
        """The last tokens of the output, as many as bad words need."""
        self._draft: _Path = ()
        """Draft tokens that the state has passed."""
        self._masks: dict[_Path, Mask | None] = {}
        """Masks after the output and its drafts; None if the output ends there."""

    @property
    def changes(self) -> bool:
        return bool(self._state is not None or self._rules.bad_words or self._thinking)

    @property
    def num_bytes(self) -> int:
        masks = len(self._masks) * self._rules.allowed.nbytes
        return masks + (self._state.num_bytes if self._state else 0)

    @property
    def place(self) -> TriePlace | None:
        rules = self._rules
        if self._state is None or rules.bad_words or not rules.allows_all or self._thinking:
            return None
        if self._draft:
            self._move(())
        return self._state.place

    @property
    def mask(self) -> Mask:
        mask = self._masks.get(())
        if mask is None:
            mask = self._masks[()] = self._compute(())
        return mask

    @property
    def must_end(self) -> bool:
        place = self.place
        return place.trie.is_leaf(place.node) if place else not self.mask.any()

    def push(self, token: int) -> None:
        if not self.changes:
            return
        self._move((token,))
        self._draft = ()
        self._length += 1
        self._recent = self._last((token,))
        self._thinking = self._thinking and self._thinking.after(token)
        if self._masks:
            self._masks = {
                draft[1:]: mask for draft, mask in self._masks.items() if draft[:1] == (token,)
            }

    def clone(self) -> "OutputConstraint":
        clone = copy(self)
        clone._state = self._state and self._state.clone()
        clone._masks = self._masks.copy()
        return clone

    def mask_after(self, draft: Sequence[int]) -> Mask | None:
        path = tuple(draft) if self.changes else ()
        if draft[-1] in self._rules.end_ids:
            return None
        if path not in self._masks:
            try:
                mask = self._compute(path)
                self._masks[path] = mask if mask.any() else None
            except ConstraintError:
                self._masks[path] = None
        return self._masks[path]

    def forced(self, max_tokens: int) -> list[int]:
        tokens: list[int] = []
        mask: Mask | None = self.mask
        while mask is not None and len(tokens) < max_tokens:
            if int(np.bitwise_count(mask).sum()) != 1:
                break
            word = int(np.flatnonzero(mask)[0])
            tokens.append(word * MASK_BITS + int(mask[word]).bit_length() - 1)
            mask = self.mask_after(tokens)
        if mask is None:  # the output ends with the last token
            tokens.pop()
        return tokens

    def allowed_nodes(self, draft: DraftTree) -> list[int]:
        return [node for node, (_, is_allowed) in enumerate(self._try(draft)) if is_allowed]

    def masks(self, draft: DraftTree) -> Masks:
        if not draft.tokens:
            return self.mask[None]
        here = self.mask
        return np.stack([here, *(here if mask is None else mask for mask, _ in self._try(draft))])

    def _try(self, draft: DraftTree) -> Iterator[tuple[Mask | None, bool]]:
        """Yield the mask after each node, and whether the node is allowed."""
        masks: list[Mask | None] = []
        paths: list[_Path] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            before = self.mask if parent < 0 else masks[parent]
            is_allowed = before is not None and allows(before, token)
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            masks.append(self.mask_after(paths[-1]) if is_allowed else None)
            yield masks[-1], is_allowed

    def _move(self, path: _Path) -> None:
        """Move the state from its draft to another. Raises ConstraintError."""
        if self._state is None:
            return
        num_common = _num_common(self._draft, path) if self._draft else 0
        if num_common < len(self._draft):
            self._state.rollback(len(self._draft) - num_common)
        for end in range(num_common, len(path)):
            self._draft = path[: end + 1]
            self._state.advance(path[end])
        self._draft = path

    def _last(self, path: _Path) -> _Path:
        num_recent = self._rules.num_recent
        return (*self._recent, *path)[-num_recent:] if num_recent else ()

    def _forced(self, path: _Path) -> int | None:
        """The token that ends the reasoning, if its budget is used up."""
        thinking = self._thinking
        for token in path:
            thinking = thinking and thinking.after(token)
        return thinking.forced if thinking else None

    def _compute(self, path: _Path) -> Mask:
        rules, state = self._rules, self._state
        if state is None:
            mask = rules.allowed.copy()
        else:
            self._move(path)
            mask = np.empty_like(rules.allowed)
            state.fill(mask)
            if not state.place:  # the end tokens in a trie belong to its sequences
                others = mask & ~rules.ends
                # If only stop tokens continue the text, one of them is its last token.
                if state.is_complete or others.any():
                    mask = others
            if state.is_complete and self._length + len(path) >= rules.min_tokens:
                mask |= rules.ends
            mask &= rules.allowed
        recent = self._last(path)
        for *before, last in rules.bad_words:
            if recent[-len(before) :] == tuple(before):
                mask[last // MASK_BITS] &= ~np.uint32(1 << last % MASK_BITS)
        forced = self._forced(path)
        if forced is not None and allows(mask, forced):
            mask = mask_of([forced], mask.size * MASK_BITS)
        if not mask.any() and not (state and state.is_complete):
            raise ConstraintError(
                "no token can follow; let structured_outputs, allowed_token_ids and bad_words "
                "allow more"
            )
        mask.flags.writeable = False  # clones of the output share it
        return mask


def _num_common(one: _Path, other: _Path) -> int:
    """The length of the common beginning."""
    different = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))


class Constraints:
    """Makes constraints, in any thread."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._grammars = Grammars(vocabulary, vocab_size)
        self._tries = Tries(vocab_size, self._grammars.encode)

    def make(
        self, params: SamplingParams, end_ids: frozenset[int], prompt: Sequence[int] = ()
    ) -> OutputConstraint | None:
        """The constraint at the beginning of outputs; None if any token may follow.

        Raises RequestError, which names the field, for an invalid grammar, or if no first token
        is allowed.
        """
        if (
            params.allowed_token_ids is None
            and params.bad_words is None
            and params.structured_outputs is None
            and params.thinking_budget is None
        ):
            return None
        vocab_size = self._vocab_size
        words = [word for text in params.bad_words or () for word in self._spellings(text)]
        allowed_ids = params.allowed_token_ids
        allowed = mask_of(range(vocab_size) if allowed_ids is None else allowed_ids, vocab_size)
        allowed &= ~mask_of([word[0] for word in words if len(word) == 1], vocab_size)
        rules = Rules(
            allowed=allowed,
            ends=mask_of([token for token in end_ids if token < vocab_size], vocab_size) & allowed,
            end_ids=end_ids,
            min_tokens=params.min_tokens,
            vocab_size=vocab_size,
            bad_words=[word for word in words if len(word) > 1],
        )
        state: GrammarState | None = None
        if params.structured_outputs is not None:
            state = self._start(params.structured_outputs, end_ids)
        constraint = OutputConstraint(rules, state, self._thinking(params, prompt))

        try:
            if constraint.must_end:
                raise ConstraintError(
                    "structured_outputs, allowed_token_ids and bad_words together allow no first "
                    "token; allow more"
                )
        except ConstraintError as error:
            raise RequestError(str(error)) from None
        return constraint

    def _start(self, outputs: StructuredOutputs, end_ids: frozenset[int]) -> GrammarState:
        if outputs.allowed_sequences is not None:
            return self._tries.state(outputs, end_ids)
        return self._grammars.compile(outputs)

    def _thinking(self, params: SamplingParams, prompt: Sequence[int]) -> Thinking | None:
        if params.thinking_budget is None:
            return None
        vocabulary = self._vocabulary
        encode = partial(vocabulary.encode, add_special=False, parse_special=True)
        return thinking(params.thinking_budget, prompt, vocabulary.token_bytes, encode)

    def _spellings(self, text: str) -> list[tuple[int, ...]]:
        spellings: dict[tuple[int, ...], None] = {}
        for prefix, parse_special in product(("", " "), (False, True)):
            tokens = self._vocabulary.encode(
                prefix + text.lstrip(), add_special=False, parse_special=parse_special
            )
            if tokens and max(tokens) < self._vocab_size:
                spellings[tuple(tokens)] = None
        return list(spellings)
