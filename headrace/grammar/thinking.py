"""Ends the reasoning of an output after a number of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.record import frozen
from headrace.sampling_params import ThinkingBudget

_PROMPT_TOKENS = 64
"""Last tokens of a prompt that may begin the reasoning."""


@frozen(kw_only=True)
class _Markers:
    budget: int
    begin: bytes
    end: bytes
    end_ids: tuple[int, ...]
    token_bytes: Callable[[int], bytes]


@frozen(kw_only=True)
class Thinking:
    """A position of an output in its reasoning, or before it."""

    markers: _Markers
    has_begun: bool
    text: bytes = b""
    """The last bytes, which may be a part of a marker."""
    num_tokens: int = 0
    """Tokens of reasoning so far."""
    num_forced: int = 0
    """Tokens of the end marker that were forced."""

    @property
    def forced(self) -> int | None:
        """The only token that may follow; None: any token."""
        if not self.has_begun or self.num_tokens < self.markers.budget:
            return None
        return self.markers.end_ids[self.num_forced % len(self.markers.end_ids)]

    def after(self, token: int) -> "Thinking | None":
        """The position after a token; None after the end of the reasoning."""
        markers = self.markers
        text = self.text + markers.token_bytes(token)
        if not self.has_begun:
            text = text.lstrip()
            if not text.startswith(markers.begin):
                return replace(self, text=text) if markers.begin.startswith(text) else None
            text = text[len(markers.begin) :]
        if markers.end in text:
            return None
        return replace(
            self,
            has_begun=True,
            text=text[-len(markers.end) :],
            num_tokens=self.num_tokens + self.has_begun,
            num_forced=self.num_forced + (token == self.forced),
        )


def thinking(
    budget: ThinkingBudget,
    prompt: Sequence[int],
    token_bytes: Callable[[int], bytes],
    encode: Callable[[str], list[int]],
) -> Thinking:
    """The position before the first token of an output. The prompt may have begun the reasoning."""
    end = b"".join(map(token_bytes, prompt[-_PROMPT_TOKENS:])).rstrip()
    markers = _Markers(
        budget=budget.max_tokens,
        begin=budget.begin.encode(),
        end=budget.end.encode(),
        end_ids=tuple(encode(budget.end)),
        token_bytes=token_bytes,
    )
    return Thinking(markers=markers, has_begun=end.endswith(markers.begin))
