"""Traces in files: JSON Lines of one's own, conversations like ShareGPT's, and the CSV of Azure's
LLM inference traces.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import RequestError
from headrace.simulator.trace import Conversation, Trace, Turn

MAX_LENGTH = 10**7
"""Max tokens of one field."""
_MAX_SECONDS = 1e9
_CHARACTERS = 4
"""Characters of a token, if no tokenizer counts."""
_FIELDS = {
    "arrival": "seconds since the start of the trace",
    "prompt_tokens": "new tokens of the prompt",
    "output_tokens": "tokens of the output",
    "prefix": "name of a prefix that requests share",
    "prefix_tokens": "tokens of the prefix",
    "conversation": "name of the conversation that the request goes on with",
    "pause": "seconds after the response before",
    "cache_salt": "name of a cache that no other salt shares",
}
"""Fields of a line of JSON Lines."""
_ASKING = ("human", "user", "system")
_ANSWERING = ("gpt", "assistant", "chatgpt", "bing", "bard")

Tokenize = Callable[[str], Sequence[int]]


class _Line:
    """A place in a file, for errors."""

    def __init__(self, path: Path, number: int) -> None:
        self._place = f"{path}, line {number:,}"

    def error(self, field: str, problem: str) -> RequestError:
        return RequestError(f"{self._place}, field '{field}': {problem}")

    def count(self, field: str, value: object, minimum: int) -> int:
        if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
            value = int(value)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not minimum <= int(str(value)) <= MAX_LENGTH:
            raise self.error(
                field,
                f"{_shown(value)} is not a whole number from {minimum} to {MAX_LENGTH:,}; write "
                "a number of tokens",
            )
        return int(str(value))

    def seconds(self, field: str, value: object) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= float(str(value)) <= _MAX_SECONDS:
            raise self.error(field, f"{_shown(value)} is not a number of seconds from 0 to 1e9")
        return float(str(value))

    def name(self, field: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.error(field, f"{_shown(value)} is not text; write a name in quotes")
        return value


def read_trace(path: Path, seed: int, rate: float, tokenize: Tokenize | None = None) -> Trace:
    """Read a trace by the ending of its file: `.jsonl`, `.json` or `.csv`.

    `seed` determines prompts that the file does not have, and the arrivals of ShareGPT's
    conversations, `rate` per second. `tokenize` counts the tokens of their texts.

    Raises RequestError, which names the line and the field.
    """
    readers: dict[str, Callable[[], Trace]] = {
        ".jsonl": lambda: _read_lines(path, seed),
        ".json": lambda: _read_sharegpt(path, seed, rate, tokenize or _estimate),
        ".csv": lambda: _read_azure(path, seed),
    }
    if path.suffix not in readers:
        raise RequestError(
            f"{path}: the ending {path.suffix!r} is of no known trace; name the file .jsonl, "
            ".json (ShareGPT) or .csv (Azure)"
        )
    try:
        trace = readers[path.suffix]()
    except UnicodeDecodeError:
        raise RequestError(f"{path}: the file is not UTF-8 text") from None
    if not trace:
        raise RequestError(f"{path}: the trace has no request; add at least one")
    return sorted(trace, key=lambda conversation: conversation.start)


# JSON Lines


def _read_lines(path: Path, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    prefixes: dict[str, int] = {}
    named: dict[str, int] = {}
    trace = Trace()
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not text.strip():
            continue
        line = _Line(path, number)
        fields = _record(line, text)
        tokens = rng.bytes(line.count("prompt_tokens", fields.get("prompt_tokens"), 1))
        output = line.count("output_tokens", fields.get("output_tokens"), 1)

        name = fields.get("conversation")
        if name is not None and line.name("conversation", name) in named:
            place = named[name]
            turn = Turn(tokens, output, line.seconds("pause", fields.get("pause", 0)))
            trace[place] = trace[place]._replace(turns=[*trace[place].turns, turn])
            _refuse(line, fields, ("arrival", "prefix", "prefix_tokens", "cache_salt"))
            continue

        _refuse(line, fields, ("pause",))
        prefix = -1
        if "prefix" in fields:
            prefix_name = line.name("prefix", fields["prefix"])
            prefix = prefixes.setdefault(prefix_name, len(prefixes))
            length = line.count("prefix_tokens", fields.get("prefix_tokens"), 1)
            tokens = _prefix(seed, prefix_name, length) + tokens
        salt = line.name("cache_salt", fields["cache_salt"]) if "cache_salt" in fields else None
        start = line.seconds("arrival", fields.get("arrival"))
        if name is not None:
            named[name] = len(trace)
        trace.append(Conversation(start, [Turn(tokens, output)], prefix, (salt, None)))
    return trace


def _record(line: _Line, text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise line.error("", f"{_shown(text)} is not a JSON object; write one on each line")
    for field in found:
        if field not in _FIELDS:
            raise line.error(field[:40], f"no such field; choose from {', '.join(_FIELDS)}")
    return found


def _refuse(line: _Line, fields: Mapping[str, Any], refused: Iterable[str]) -> None:
    for field in refused:
        if field in fields:
            turn = "the first turn" if field == "pause" else "a later turn"
            raise line.error(field, f"{turn} of a conversation has none; leave it out")


def _prefix(seed: int, name: str, length: int) -> bytes:
    """The tokens of a named prefix; a longer one starts with the tokens of a shorter one."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).bytes(length)


# ShareGPT


def _read_sharegpt(path: Path, seed: int, rate: float, tokenize: Tokenize) -> Trace:
    text = path.read_text("utf-8")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Line(path, error.lineno).error("", f"no JSON: {error.msg}") from None
    except (ValueError, RecursionError):
        raise _Line(path, 1).error("", "no JSON that can be read") from None
    if not isinstance(found, list):
        raise _Line(path, 1).error("", "no list of conversations")
    rng = np.random.default_rng(seed)
    trace, start = Trace(), 0.0
    for number, entry in enumerate(found, 1):
        turns = list(_turns(f"{path}, conversation {number:,}", entry, tokenize))
        if turns:
            trace.append(Conversation(start, turns))
            start += float(rng.exponential(1 / rate))
    return trace


def _turns(place: str, entry: object, tokenize: Tokenize) -> Iterator[Turn]:
    """Pairs of a text by a person and the response to it."""
    messages = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(messages, list):
        raise RequestError(f"{place}, field 'conversations': no list of messages")
    asked: Sequence[int] = b""
    for number, message in enumerate(messages, 1):
        speaker = message.get("from") if isinstance(message, dict) else None
        if speaker not in _ASKING + _ANSWERING:
            raise RequestError(
                f"{place}, message {number:,}, field 'from': {_shown(speaker)} is not human or gpt"
            )
        if not isinstance(text := message.get("value"), str):
            raise RequestError(
                f"{place}, message {number:,}, field 'value': {_shown(text)} is not text"
            )
        tokens = bytes(token % 256 for token in tokenize(text))
        if speaker in _ASKING:
            asked = bytes(asked) + tokens
        elif asked:
            yield Turn(asked, max(1, len(tokens)))
            asked = b""


def _estimate(text: str) -> Sequence[int]:
    return text.encode()[::_CHARACTERS]


# Azure


def _read_azure(path: Path, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    names = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        try:
            header = next(rows, [])
            absent = [name for name in names if name not in header]
            if absent:
                raise _Line(path, 1).error(
                    absent[0], f"no such column; the header must name {', '.join(names)}"
                )
            places = [header.index(name) for name in names]
            found: list[tuple[float, Turn]] = []
            for row in rows:
                if not row:
                    continue
                line = _Line(path, rows.line_num)
                if len(row) <= max(places):
                    raise line.error(names[places.index(max(places))], "the line ends before it")
                time, prompt, output = (row[place] for place in places)
                turn = Turn(
                    rng.bytes(line.count(names[1], prompt, 1)), line.count(names[2], output, 1)
                )
                found.append((_time(line, names[0], time), turn))
        except csv.Error as error:
            raise _Line(path, rows.line_num).error("", f"no CSV: {error}") from None
    first = min((time for time, _ in found), default=0.0)
    return [Conversation(time - first, [turn]) for time, turn in found]


def _time(line: _Line, field: str, text: str) -> float:
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise line.error(
            field, f"{_shown(text)} is not a time such as 2023-11-16 18:15:46.6805900"
        ) from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
