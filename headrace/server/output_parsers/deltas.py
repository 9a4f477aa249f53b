from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model writes for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A fragment of a tool call's arguments; all fragments form a JSON object."""

    index: int
    text: str


Delta = Content | Reasoning | ToolCallStart | ToolCallArguments


def merge_deltas(deltas: list[Delta]) -> list[Delta]:
    result: list[Delta] = []
    texts: list[str] = []
    for delta in deltas:
        last = result[-1] if result else None
        if not _continues(last, delta):
            _set_text(result, texts)
            result.append(delta)
            texts.clear()
        if not isinstance(delta, ToolCallStart):
            texts.append(delta.text)
    _set_text(result, texts)
    return result


def _continues(last: Delta | None, delta: Delta) -> bool:
    if isinstance(delta, ToolCallArguments):
        return isinstance(last, ToolCallArguments) and last.index == delta.index
    return isinstance(delta, Content | Reasoning) and type(last) is type(delta)


def _set_text(result: list[Delta], texts: list[str]) -> None:
    if len(texts) < 2:
        return
    last, text = result[-1], "".join(texts)
    if isinstance(last, ToolCallArguments):
        result[-1] = ToolCallArguments(last.index, text)
    else:
        result[-1] = Content(text) if isinstance(last, Content) else Reasoning(text)
