"""Grammar, allowed tokens and bad words of an output as one mask."""

from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from itertools import product

import numpy as np

from headrace.batch import DraftTree
from headrace.constraint import MASK_BITS, GrammarState, Mask, Masks, mask_of
from headrace.errors import ConstraintError, RequestError
from headrace.grammar.grammars import Grammars, Vocabulary
from headrace.record import frozen
from headrace.sampling_params import SamplingParams


@frozen
class Rules:
    """Rules for all outputs of a request."""

    allowed: Mask
    ends: Mask
    """Tokens that end an output whose text completes its grammar."""
    end_ids: frozenset[int]
    min_tokens: int
    bad_words: list[tuple[int, ...]] = field(default_factory=list)
    """Forbidden runs of two or more tokens."""

    @cached_property
    def num_recent(self) -> int:
        return max((len(word) - 1 for word in self.bad_words), default=0)


class OutputConstraint:
    """A `Constraint` on an output of `length` tokens whose last tokens are `recent`."""

    def __init__(
        self,
        rules: Rules,
        state: GrammarState | None,
        length: int = 0,
        recent: tuple[int, ...] = (),
    ) -> None:
        self.changes = state is not None or bool(rules.bad_words)
        self._rules = rules
        self._state = state
        self._length = length
        self._recent = recent
        self._next: dict[int, OutputConstraint] = {}

    @cached_property
    def mask(self) -> Mask:
        rules = self._rules
        if self._state is None:
            mask = rules.allowed.copy()
        else:
            mask = np.empty_like(rules.allowed)
            self._state.fill(mask)
            others = mask & ~rules.ends
            # If only stop tokens continue the text, one of them is its last token.
            if self._state.is_complete or others.any():
                mask = others
            if self._state.is_complete and self._length >= rules.min_tokens:
                mask |= rules.ends
            mask &= rules.allowed
        for *before, last in rules.bad_words:
            if self._recent[-len(before) :] == tuple(before):
                mask[last // MASK_BITS] &= ~np.uint32(1 << last % MASK_BITS)
        if not mask.any() and not (self._state and self._state.is_complete):
            raise ConstraintError(
                "no token can follow; let structured_outputs, allowed_token_ids and bad_words "
                "allow more"
            )
        mask.flags.writeable = False  # drafts and forks of the output share it
        return mask

    @property
    def must_end(self) -> bool:
        return not self.mask.any()

    def after(self, token: int) -> "OutputConstraint":
        if not self.changes:
            return self
        found = self._next.get(token)
        if found is None:
            state = self._state and self._state.after(token)
            recent = (
                (*self._recent, token)[-self._rules.num_recent :] if self._rules.num_recent else ()
            )
            found = self._next[token] = OutputConstraint(
                self._rules, state, self._length + 1, recent
            )
        return found

    def continuation(self, token: int) -> "OutputConstraint | None":
        if token in self._rules.end_ids:
            return None
        try:
            found = self.after(token)
            return None if found.must_end else found
        except ConstraintError:
            return None

    def forced(self, max_tokens: int) -> list[int]:
        tokens: list[int] = []
        current: OutputConstraint | None = self
        while current and len(tokens) < max_tokens:
            mask = current.mask
            if int(np.bitwise_count(mask).sum()) != 1:
                break
            word = int(np.flatnonzero(mask)[0])
            token = word * MASK_BITS + int(mask[word]).bit_length() - 1
            current = current.continuation(token)
            if current:
                tokens.append(token)
        return tokens

    def allowed_nodes(self, draft: DraftTree) -> list[int]:
        return [node for node, (_, is_allowed) in enumerate(self._walk(draft)) if is_allowed]

    def masks(self, draft: DraftTree) -> Masks:
        if not draft.tokens:
            return self.mask[None]
        return np.stack([self.mask, *((after or self).mask for after, _ in self._walk(draft))])

    def _walk(self, draft: DraftTree) -> Iterator[tuple["OutputConstraint | None", bool]]:
        after: list[OutputConstraint | None] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            before = self if parent < 0 else after[parent]
            is_allowed = before is not None and bool(
                before.mask[token // MASK_BITS] >> np.uint32(token % MASK_BITS) & 1
            )
            after.append(before.continuation(token) if before and is_allowed else None)
            yield after[-1], is_allowed


class Constraints:
    """Makes constraints, in any thread."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._grammars = Grammars(vocabulary, vocab_size)

    def make(self, params: SamplingParams, end_ids: frozenset[int]) -> OutputConstraint | None:
        """The constraint at the beginning of outputs; None if any token may follow.

        Raises RequestError, which names the field, for an invalid grammar, or if no first token
        is allowed.
        """
        if (
            params.allowed_token_ids is None
            and params.bad_words is None
            and params.structured_outputs is None
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
            bad_words=[word for word in words if len(word) > 1],
        )
        state = None
        if params.structured_outputs is not None:
            state = self._grammars.compile(params.structured_outputs)
        constraint = OutputConstraint(rules, state)

        try:
            if constraint.must_end:
                raise ConstraintError(
                    "structured_outputs, allowed_token_ids and bad_words together allow no first "
                    "token; allow more"
                )
        except ConstraintError as error:
            raise RequestError(str(error)) from None
        return constraint

    def _spellings(self, text: str) -> list[tuple[int, ...]]:
        spellings: dict[tuple[int, ...], None] = {}
        for prefix, parse_special in product(("", " "), (False, True)):
            tokens = self._vocabulary.encode(
                prefix + text.lstrip(), add_special=False, parse_special=parse_special
            )
            if tokens and max(tokens) < self._vocab_size:
                spellings[tuple(tokens)] = None
        return list(spellings)
