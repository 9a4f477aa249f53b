r"""Expressions for module names in PEFT's configurations.

PEFT matches `(.*\.)?EXPRESSION$` with Python's `re` (`get_pattern_key`), where a hostile expression
takes forever. Here are literals, `.`, `\d`, `\w`, `*`, `+`, `?` after one character, and groups
of alternatives without a repetition. The time is the product of both lengths.
"""

import re
from functools import lru_cache
from typing import NamedTuple

_MAX_ATOMS = 200
_TOKEN = re.compile(r"\\[.dw]|\(\?:|[()|]|(?:[\w-]|\.)")
_QUANTIFIERS = "*+?"


class _Atom(NamedTuple):
    character: str
    """A literal, or `any`, `digit`, `word`."""
    may_skip: bool = False
    may_repeat: bool = False


_Sequence = tuple[_Atom, ...]
_CLASSES = {".": "any", r"\d": "digit", r"\w": "word", r"\.": "."}


@lru_cache
def compiled(expression: str) -> list[_Sequence] | None:
    """The alternatives of an expression; None if it has other elements or is too large."""
    tokens = []
    text = expression.removeprefix("^").removesuffix("$")
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        position = match.end()
        quantifier = text[position : position + 1]
        if quantifier and quantifier in _QUANTIFIERS:
            position += 1
        else:
            quantifier = ""
        tokens.append((match[0], quantifier))
    tokens.append((")", ""))
    alternatives, rest = _alternatives(tokens)
    return None if rest or not alternatives else alternatives


def matches(alternatives: list[_Sequence], name: str, *, at_start: bool = False) -> bool:
    """Whether the whole name matches, or unless `at_start` its end after a dot."""
    dots = () if at_start else [i for i, character in enumerate(name) if character == "."]
    starts = {0, *(i + 1 for i in dots)}
    return any(_matches(sequence, name, starts) for sequence in alternatives)


_Tokens = list[tuple[str, str]]


def _alternatives(tokens: _Tokens) -> tuple[list[_Sequence], _Tokens]:
    """The alternatives up to a closing bracket, and the rest; none if they are refused."""
    done: list[_Sequence] = []
    open_: list[_Sequence] = [()]
    while tokens:
        (token, quantifier), tokens = tokens[0], tokens[1:]
        if quantifier and token in ("(", "(?:", "|", ")"):
            return [], tokens
        if token in ("(", "(?:"):
            inner, tokens = _alternatives(tokens)
            open_ = [a + b for a in open_ for b in inner]
        elif token in ("|", ")"):
            done, open_ = done + open_, [()]
            if token == ")":
                return done, tokens
        else:
            character = _CLASSES.get(token, token)
            atoms = [_Atom(character, quantifier in ("*", "?"), quantifier == "*")]
            if quantifier == "+":
                atoms = [_Atom(character), _Atom(character, may_skip=True, may_repeat=True)]
            open_ = [(*sequence, *atoms) for sequence in open_]
        if not open_ or sum(map(len, done + open_)) > _MAX_ATOMS:
            return [], tokens
    return [], tokens


def _matches(sequence: _Sequence, name: str, starts: set[int]) -> bool:
    states: set[int] = set()
    for position, character in enumerate(name):
        if position in starts:
            states.add(0)
        states = _with_skipped(sequence, states)
        after = set()
        for state in states:
            if state < len(sequence) and _accepts(sequence[state].character, character):
                after.add(state if sequence[state].may_repeat else state + 1)
        states = after
    return len(sequence) in _with_skipped(sequence, states)


def _with_skipped(sequence: _Sequence, states: set[int]) -> set[int]:
    reached = set(states)
    for state in range(len(sequence)):
        if state in reached and sequence[state].may_skip:
            reached.add(state + 1)
    return reached


def _accepts(wanted: str, character: str) -> bool:
    match wanted:
        case "any":
            return True
        case "digit":
            return character.isdecimal()
        case "word":
            return character.isalnum() or character == "_"
    return wanted == character
