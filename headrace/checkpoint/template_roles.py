"""Folds the roles of a conversation into the roles that a chat template takes.

Templates differ: some have no system message, some take it only at the beginning, some refuse two
messages of one role in a row. A template that refuses a message or drops its text gets the text
in another message. A lenient template gets the messages as they are.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

Message = dict[str, Any]
Probe = Callable[[list[Message]], str]

_TEXT, _MORE = "qzcontentqz", "qzfurtherqz"
_SYSTEM = ("system", "developer")


class RoleFolds:
    """The folds of one template. `probe` renders messages, and is empty if that fails."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._takes_system = cache(self._find_takes_system)
        self._takes_more_systems = cache(self._find_takes_more_systems)
        self._repeats = cache(self._find_repeats)

    def fold(
        self, messages: list[Message], places: list[str]
    ) -> tuple[list[Message], list[str], list[str]]:
        """Return the messages, the place of each in the request, and notes of the changes."""
        pairs, notes = list(zip(messages, places, strict=True)), list[str]()
        self._fold_systems(pairs, notes)
        self._join_repeated(pairs, notes)
        return [message for message, _ in pairs], [place for _, place in pairs], notes

    def _fold_systems(self, pairs: list[tuple[Message, str]], notes: list[str]) -> None:
        late = [i for i, (message, _) in enumerate(pairs) if i and message.get("role") in _SYSTEM]
        starts = pairs[0][0].get("role") in _SYSTEM if pairs else False
        if not starts and not late:
            return
        if not self._takes_system(pairs[0][0]["role"] if starts else "system"):
            self._fold_into_user(pairs, notes)
            return
        moved = [i for i in late if not self._takes_more_systems(is_second=starts and i == 1)]
        if not moved:
            return
        names = ", ".join(_places(pairs, moved))
        notes.append(
            f"the chat template takes one system message, so that {names} went to the beginning"
        )
        first = pairs.pop(0) if starts else None
        texts = [pairs.pop(i - starts) for i in reversed(moved)][::-1]
        place = first[1] if first else texts[0][1]
        message = {"role": "system"} | (first[0] if first else {})
        every = [*([first] if first else []), *texts]
        pairs.insert(0, (message | {"content": _joined([item for item, _ in every])}, place))

    def _fold_into_user(self, pairs: list[tuple[Message, str]], notes: list[str]) -> None:
        """Put the text of all system messages before the text of the first user's."""
        user = next((i for i, (item, _) in enumerate(pairs) if item.get("role") == "user"), None)
        if user is None or _TEXT not in self._probe([_message("user", _TEXT)]):
            return
        systems = [i for i, (message, _) in enumerate(pairs) if message.get("role") in _SYSTEM]
        notes.append(
            f"the chat template takes no system message, so that the text of "
            f"{', '.join(_places(pairs, systems))} went to the first user's message"
        )
        message, place = pairs[user]
        parts = [*(pairs[i][0] for i in systems), message]
        pairs[user] = (message | {"content": _joined(parts)}, place)
        for i in reversed(systems):
            del pairs[i]

    def _join_repeated(self, pairs: list[tuple[Message, str]], notes: list[str]) -> None:
        """Join messages of one role in a row, if the template refuses or drops one of them."""
        for i in range(len(pairs) - 1, 0, -1):
            (before, place), (message, _) = pairs[i - 1], pairs[i]
            role = message.get("role")
            if role not in ("user", "assistant") or before.get("role") != role:
                continue
            if "tool_calls" in before or self._repeats(role):
                continue
            notes.append(
                f"the chat template takes no second {role} message, so that {place} got its text"
            )
            both = before | message | {"content": _joined([before, message])}
            pairs[i - 1 : i + 1] = [(both, place)]

    def _find_takes_system(self, role: str) -> bool:
        return _TEXT in self._probe([_message(role, _TEXT), _message("user", "qz")])

    def _find_takes_more_systems(self, is_second: bool) -> bool:
        between = [] if is_second else [_message("user", "qz"), _message("assistant", "qz")]
        text = self._probe(
            [_message("system", _TEXT), *between, _message("system", _MORE), _message("user", "qz")]
        )
        return _TEXT in text and _MORE in text

    def _find_repeats(self, role: str) -> bool:
        """Whether two messages of a role may follow each other, or the template is of no use."""
        before = [] if role == "user" else [_message("user", "qz")]
        single = self._probe([*before, _message(role, _TEXT)])
        text = self._probe([*before, _message(role, _TEXT), _message(role, _MORE)])
        return _TEXT not in single or (_TEXT in text and _MORE in text)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _places(pairs: list[tuple[Message, str]], indices: list[int]) -> list[str]:
    return [pairs[i][1] for i in indices]


def _joined(messages: list[Message]) -> str:
    texts = [text_of(message.get("content")) for message in messages]
    return "\n\n".join(text for text in texts if text)


def text_of(content: Any) -> str:
    """Return the text of a normalised content."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""
