"""The part of a sequence that proposers of earlier text read."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class View:
    known: list[int]
    seq_id: tuple[int, int] = (0, 0)
    prompt_len: int = field(default=1)
    scope: str = ""
