"""Prompts that a model answers: those of a file, or various prompts without a file.

A model that was trained on conversations writes a user's message when it goes on after the head of
a user turn (Magpie, Xu et al. 2024). Other prompts come from lists (`prompt_forms.py`): questions,
and tasks about texts and code that the model writes first. A model without a chat template goes on
after its first token.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.distil import prompt_forms
from headrace.errors import RequestError
from headrace.prompts import PromptReader
from headrace.record import frozen

_MARK = "headrace-user-message"
"""A message whose place in the rendered template is the end of the head of a user turn."""
_MIN_TOKENS = 4
_MAX_MESSAGE = 160
"""Maximum tokens of a message that a model writes itself."""
_MAX_TEXT = 224
"""Maximum tokens of a text for a task."""
_BASE_TOKENS = 24
"""Tokens that a model without a chat template writes as a prompt."""
_MIN_DISTINCT = 0.7
"""Share of different pairs of words, below which a text repeats itself."""
REASON_FIRST = (
    "Think about the task step by step and write down your reasoning first. "
    "Then write the answer after the word 'Answer:'."
)
_TOPICS = (
    ("", ""),
    ("The user has a question about everyday life, science, history or health.", ""),
    ("The user asks for help with a program: to write, explain, test or correct code.", ""),
    ("", "Summarize the following article in a few sentences.\n\nThe"),
    ("The user asks for a letter, an e-mail, a story, a plan or a list.", ""),
    ("The user has a problem of arithmetic or logic, with all its numbers.", ""),
)
"""A system message and the first words of the user's, under which a model writes messages in turn;
no system message: that of its template.
"""
_KINDS = "message question message text message question code message".split() + (
    "question text message follow_up message question code text".split()
)
"""The kinds of prompts, in turn: a message that the model writes, a question, a task about a text
or code, a second message.
"""
_MESSAGE_TEMPERATURE = 0.9
_TEXT_TEMPERATURE = 0.7
_BASE_TEMPERATURE = 0.75

Messages = list[dict[str, str]]


class TeacherPrompt(NamedTuple):
    """A prompt as token ids."""

    tokens: tuple[int, ...]
    """The prompt that is stored with the answer."""
    asked: tuple[int, ...]
    """The prompt that the model answers: the same, or one that asks for its reasoning, too."""


@frozen(kw_only=True)
class PromptStart:
    """The start of a prompt, of which a model writes the rest or a part."""

    tokens: tuple[int, ...] = ()
    """Tokens that the model goes on with."""
    max_tokens: int = 0
    """Maximum tokens that the model writes; 0: the prompt is complete."""
    temperature: float = _MESSAGE_TEMPERATURE
    ends: bool | None = None
    """Whether the model ends its text itself; None: it may."""
    conversation: Callable[[str], Messages]
    """Makes the messages of the prompt from the text that the model wrote."""


def file_hash(path: Path | None) -> str:
    """Hash a file; empty without one. Raises RequestError if it cannot be read."""
    return blake2b(_read(path), digest_size=16).hexdigest() if path else ""


class PromptMaker:
    """Makes the prompts of one model."""

    def __init__(
        self, reader: PromptReader, tokenizer: Tokenizer, *, rationales: bool = False
    ) -> None:
        """`rationales`: the model is asked to reason before it answers."""
        self._reader = reader
        self._tokenizer = tokenizer
        self._rationales = rationales
        self._is_chat = bool(reader.templates)

    def from_file(self, path: Path) -> list[TeacherPrompt]:
        """Read the prompts of a file.

        A `.jsonl` file has a JSON value in each line, a `.json` file a list of them: a list of
        messages, an object with `messages`, with `conversations` as ShareGPT has them, or with
        `prompt`, or a text. Of a conversation the part up to its last user message counts. Any
        other file has one prompt in each line. Raises RequestError, which names the line.
        """
        prompts = []
        for place, value in _values(path):
            try:
                prompts.append(self._prompt(_messages(value)))
            except RequestError as error:
                raise RequestError(f"{path}, {place}: {error}") from error
        if not prompts:
            raise RequestError(f"{path} has no prompts; write one in each line")
        return prompts

    def start(self, index: int, seed: int) -> PromptStart:
        """Make the start of the prompt of this number. `seed` chooses among forms and subjects."""
        if not self._is_chat:
            return PromptStart(
                tokens=self._tokenizer.prefix_ids or _known(self._tokenizer),
                max_tokens=_BASE_TOKENS,
                temperature=_BASE_TEMPERATURE,
                ends=False,
                conversation=_message_with,
            )
        kind, rng = _KINDS[index % len(_KINDS)], random.Random(seed)
        if kind == "message":
            return self._message_start(rng)
        if kind == "question":
            text = prompt_forms.question(rng)
            return PromptStart(conversation=partial(_whole, text))
        if kind == "follow_up":
            first, second = prompt_forms.follow_up(rng)
            return self._text_start(first, partial(_second_turn, first, second))
        request, task = (
            prompt_forms.text_request(rng) if kind == "text" else prompt_forms.code_request(rng)
        )
        return self._text_start(request, partial(_message_with, f"{task}\n\n"))

    def _message_start(self, rng: random.Random) -> PromptStart:
        """The head of a user turn."""
        topic, opening = rng.choice(_TOPICS)
        system = [{"role": "system", "content": topic}] if topic else []
        message = {"role": "user", "content": _MARK}
        text = self._rendered([*system, message], add_generation_prompt=False)
        head, mark, _ = text.partition(_MARK)
        if not mark:
            raise RequestError(
                "the chat template of the model does not copy a user's message, so the model "
                "cannot write prompts; give a file of prompts"
            )
        return PromptStart(
            tokens=tuple(self._tokenizer.encode(head + opening, add_special=False)),
            max_tokens=_MAX_TEXT if opening else _MAX_MESSAGE,
            ends=True,
            conversation=partial(_message_with, opening),
        )

    def _text_start(self, request: str, conversation: Callable[[str], Messages]) -> PromptStart:
        """A request for a text of the model, from which `conversation` makes a prompt."""
        return PromptStart(
            tokens=tuple(self._reader.read_chat(_whole(request)).token_ids),
            max_tokens=_MAX_TEXT,
            temperature=_TEXT_TEMPERATURE,
            conversation=conversation,
        )

    def written(
        self, start: PromptStart, output: Sequence[int], *, ended: bool
    ) -> TeacherPrompt | None:
        """Make a prompt of the tokens that the model wrote after a start; None if they are none.

        `ended` says whether the model ended them. Texts are refused if they did not end, are very
        short, repeat themselves or have control tokens.
        """
        if not start.max_tokens:
            return self._prompt(start.conversation(""))
        body = [token for token in output if token not in self._tokenizer.eos_ids]
        has_control = any(token in self._tokenizer.special_ids for token in body)
        if start.ends not in (None, ended) or has_control or len(body) < _MIN_TOKENS:
            return None
        if not self._is_chat:
            tokens = (*start.tokens, *body)
            return TeacherPrompt(tokens, tokens)
        text = self._tokenizer.decode(body)
        return None if _repeats(text) else self._prompt(start.conversation(text))

    def key(self, prompt: TeacherPrompt) -> str:
        """Return the text by which two prompts count as equal."""
        return " ".join(self._tokenizer.decode(list(prompt.tokens)).lower().split())

    def _prompt(self, messages: Messages) -> TeacherPrompt:
        if not self._is_chat:
            text = "\n\n".join(message["content"] for message in messages)
            asked = f"{text}\n\n{REASON_FIRST}" if self._rationales else text
            return TeacherPrompt(self._plain(text), self._plain(asked))
        tokens = tuple(self._reader.read_chat(messages).token_ids)
        if not self._rationales:
            return TeacherPrompt(tokens, tokens)
        last = messages[-1]
        reasoned = [*messages[:-1], last | {"content": f"{last['content']}\n\n{REASON_FIRST}"}]
        return TeacherPrompt(tokens, tuple(self._reader.read_chat(reasoned).token_ids))

    def _plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._reader.read_prompt(text, parse_special=False).token_ids)

    def _rendered(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        text = self._reader.read_chat(messages, add_generation_prompt=add_generation_prompt).text
        assert text is not None, "a conversation is rendered to text"
        return text


def _whole(text: str, _: str = "") -> Messages:
    return [{"role": "user", "content": text}]


def _message_with(before: str, text: str = "") -> Messages:
    """A message that ends with the text."""
    return _whole(f"{before}{text}".strip())


def _second_turn(first: str, second: str, text: str) -> Messages:
    """A conversation in which the text answers the first of two messages."""
    return [*_whole(first), {"role": "assistant", "content": text.strip()}, *_whole(second)]


def _known(tokenizer: Tokenizer) -> tuple[int, ...]:
    """A token that a text may begin with: BOS, or else the end of another text."""
    token = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if token is None:
        raise RequestError(
            "the model has no chat template, BOS or end token, so it cannot write prompts; give a "
            "file of prompts"
        )
    return (token,)


def _repeats(text: str) -> bool:
    words = text.lower().split()
    pairs = list(pairwise(words))
    return not pairs or len(set(pairs)) < _MIN_DISTINCT * len(pairs)


def _values(path: Path) -> Iterable[tuple[str, Any]]:
    """The prompts of a file, as JSON values, and their places."""
    try:
        text = _read(path).decode()
    except UnicodeDecodeError:
        raise RequestError(f"{path} is not a text in UTF-8; save it as UTF-8") from None
    if path.suffix == ".json":
        values = _json(text, str(path))
        if not isinstance(values, list):
            raise RequestError(f"{path} is not a list of prompts; write a JSON list, or JSON lines")
        yield from ((f"entry {i}", value) for i, value in enumerate(values, 1))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            place = f"line {number}"
            is_json = path.suffix == ".jsonl"
            yield place, _json(line, f"{path}, {place}") if is_json else line.strip()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestError(f"prompts '{path}': {error.strerror}; name a file of prompts") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not valid JSON: {error}; correct it") from None


def _messages(value: Any) -> Messages:
    """The messages of a prompt up to the last one of the user."""
    if isinstance(value, Mapping):
        for name in ("messages", "conversations", "prompt"):
            if name in value:
                value = value[name]
                break
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RequestError(
            "a prompt must be a text, a list of messages, or an object with messages, "
            "conversations or prompt"
        )
    messages = [_message(each) for each in value]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise RequestError("the conversation has no user message; add one, or remove it")
    return messages


_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles in ShareGPT's words."""


def _message(value: Any) -> dict[str, str]:
    role = content = None
    if isinstance(value, Mapping):
        role, content = (
            value.get("role", value.get("from")),
            value.get("content", value.get("value")),
        )
    if not isinstance(role, str) or not isinstance(content, str):
        raise RequestError(
            "a message must have a role and content (or from and value), which are texts"
        )
    return {"role": _ROLES.get(role, role), "content": content}
