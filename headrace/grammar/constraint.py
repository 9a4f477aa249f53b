"""What may follow in an output: its grammar, the tokens that it is allowed, and words that are not
to come, as one mask.
"""

from collections.abc import Iterator
from dataclasses import field
from functools import cached_property

import numpy as np

from headrace.batch import DraftTree
from headrace.constraint import MASK_BITS, GrammarState, Mask, Masks, mask_of
from headrace.errors import ConstraintError, RequestError
from headrace.grammar.grammars import Grammars, Vocabulary
from headrace.record import frozen
from headrace.request import SamplingParams


@frozen
class Rules:
    """What holds for all outputs of a request, wherever they are."""

    allowed: Mask
    """The tokens that any of them may have."""
    ends: Mask
    """Those of them that end an output with a grammar, once its text is complete."""
    end_ids: frozenset[int]
    min_tokens: int
    """Tokens before the first that may end an output."""
    bad_words: list[tuple[int, ...]] = field(default_factory=list)
    """Runs of two tokens or more that are not to come."""

    @cached_property
    def num_recent(self) -> int:
        """Tokens at the end of an output that decide which bad words may come to their end."""
        return max((len(word) - 1 for word in self.bad_words), default=0)


class OutputConstraint:
    """What may follow in an output of `length` tokens, the last of which are `recent`: a
    `Constraint`.

    It keeps the constraints behind it that were asked for, so that what was computed for a draft is
    there when the draft is accepted.
    """

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
            if (
                self._state.is_complete or others.any()
            ):  # else the text goes on with a stop token, and ends there
                mask = others
            if self._state.is_complete and self._length >= rules.min_tokens:
                mask |= rules.ends
            mask &= rules.allowed
        for *before, last in rules.bad_words:
            if self._recent[-len(before) :] == tuple(before):
                mask[last // MASK_BITS] &= ~np.uint32(1 << last % MASK_BITS)
        if not mask.any() and not (self._state and self._state.is_complete):
            raise ConstraintError(
                "no token can follow: the request's structured_outputs, allowed_token_ids "
                "and bad_words leave none"
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

    def beyond(self, token: int) -> "OutputConstraint | None":
        if token in self._rules.end_ids:
            return None
        try:
            found = self.after(token)
            return None if found.must_end else found
        except ConstraintError:
            return None

    def forced(self, max_tokens: int) -> list[int]:
        tokens: list[int] = []
        at: OutputConstraint | None = self
        while at and len(tokens) < max_tokens and int(np.bitwise_count(at.mask).sum()) == 1:
            word = int(np.flatnonzero(at.mask)[0])
            token = word * MASK_BITS + int(at.mask[word]).bit_length() - 1
            at = at.beyond(token)
            if at:
                tokens.append(token)
        return tokens

    def permitted(self, draft: DraftTree) -> list[int]:
        return [node for node, (_, is_permitted) in enumerate(self._walk(draft)) if is_permitted]

    def masks(self, draft: DraftTree) -> Masks:
        if not draft.tokens:
            return self.mask[None]
        return np.stack([self.mask, *((behind or self).mask for behind, _ in self._walk(draft))])

    def _walk(self, draft: DraftTree) -> Iterator[tuple["OutputConstraint | None", bool]]:
        """For each node the constraint behind it, unless the output ends there, and whether it may
        be drawn at all.
        """
        behind: list[OutputConstraint | None] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            at = self if parent < 0 else behind[parent]
            is_permitted = at is not None and bool(
                at.mask[token // MASK_BITS] >> np.uint32(token % MASK_BITS) & 1
            )
            behind.append(at.beyond(token) if at and is_permitted else None)
            yield behind[-1], is_permitted


class Constraints:
    """Makes the constraints of requests. Any thread may ask it to."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._grammars = Grammars(vocabulary, vocab_size)

    def make(self, params: SamplingParams, end_ids: frozenset[int]) -> OutputConstraint | None:
        """What the outputs of a request may begin with; None where they may be anything.

        Raises RequestError, which names the field, for what cannot be, and where no output can have
        a token.
        """
        if (
            params.allowed_token_ids is None
            and params.bad_words is None
            and params.structured_outputs is None
        ):
            return None
        words = [word for text in params.bad_words or () for word in self._spellings(text)]
        banned = mask_of([word[0] for word in words if len(word) == 1], self._vocab_size)
        allowed = mask_of(
            range(self._vocab_size)
            if params.allowed_token_ids is None
            else params.allowed_token_ids,
            self._vocab_size,
        )
        allowed &= ~banned
        ends = (
            mask_of([token for token in end_ids if token < self._vocab_size], self._vocab_size)
            & allowed
        )
        longer = [word for word in words if len(word) > 1]
        state = (
            None
            if params.structured_outputs is None
            else self._grammars.compile(params.structured_outputs)
        )
        constraint = OutputConstraint(
            Rules(allowed, ends, end_ids, params.min_tokens, longer), state
        )
        try:
            if constraint.must_end:
                raise ConstraintError(
                    "structured_outputs, allowed_token_ids and bad_words allow no first token"
                )
        except ConstraintError as error:
            raise RequestError(str(error)) from None
        return constraint

    def _spellings(self, text: str) -> list[tuple[int, ...]]:
        """The tokens of a word, and those with a space before it."""
        word = text.lstrip()
        both = (
            tuple(self._vocabulary.encode(prefix + word, add_special=False)) for prefix in ("", " ")
        )
        return list(
            dict.fromkeys(tokens for tokens in both if tokens and max(tokens) < self._vocab_size)
        )
