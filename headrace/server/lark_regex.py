"""Converts Lark grammars without recursion to regular expressions.

The input of a custom tool is a JSON string in the calls of most models. A grammar of the text
inside of that string is a `pattern` of its schema, which is a regular expression.
"""

import json
import re
from functools import cached_property

from headrace.errors import RequestError

_MAX_CHARACTERS = 1 << 15
_COMMON = {
    "CR": r"\r",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?",
    "SIGNED_INT": "[+-]?[0-9]+",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Terminals of Lark's `common`."""
_TOKEN = re.compile(
    r"(?P<space>[ \t\r]+|//[^\n]*|\n\s*(?=\|)|\n(?=[ \t]+[^\s:]+[ \t]*(?:[^:\s]|$)))"
    r'|(?P<line>\n)|(?P<text>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[imsux]*)'
    r"|(?P<alias>->[ \t]*\w+|\.\d+(?=[ \t]*:))|(?P<import>%import[ \t]+common\.(?P<imported>\w+))"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<repeat>~[ \t]*(?P<least>\d+)(?:[ \t]*\.\.[ \t]*(?P<most>\d+))?)"
    r"|(?P<mark>[|()*+?:!\[\]])"
)


_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")


class _Unsupported(Exception):
    """Words about what no regular expression has."""


def lark_to_regex(grammar: str) -> str:
    """Return an expression for all texts of the rule `start`.

    Raises RequestError with the reason if there is none: recursion, `%ignore`, templates and other
    directives.
    """
    try:
        return _Grammar(grammar).expand("start", ())
    except _Unsupported as error:
        raise RequestError(f"is no regular language here: {error}") from None


class _Grammar:
    def __init__(self, text: str) -> None:
        self._rules: dict[str, list[re.Match[str]]] = {}
        self._regexes: dict[str, str] = {}
        line: list[re.Match[str]] = []
        position = 0
        while position < len(text):
            token = _TOKEN.match(text, position)
            if token is None:
                raise _Unsupported(f"{text[position : position + 20]!r} is not supported")
            position = token.end()
            if token["line"]:
                self._add(line)
                line = []
            elif token["import"]:
                name = token["imported"]
                if name not in _COMMON:
                    raise _Unsupported(f"common.{name} is not supported")
                self._regexes[name] = f"(?:{_COMMON[name]})"
            elif not token["space"] and not token["alias"]:
                line.append(token)
        self._add(line)

    def _add(self, line: list[re.Match[str]]) -> None:
        while line and line[0][0] in ("?", "!"):
            line = line[1:]
        if not line:
            return
        if len(line) < 3 or not line[0]["name"] or line[1][0] != ":":
            raise _Unsupported(f"{line[0][0][:20]!r} begins no rule")
        self._rules[line[0][0]] = line[2:]

    def expand(self, name: str, open_rules: tuple[str, ...]) -> str:
        if name in open_rules:
            raise _Unsupported(f"the rule {name} contains itself")
        if name not in self._regexes:
            if name not in self._rules:
                raise _Unsupported(f"the rule {name} is missing")
            parser = _Expressions(self, self._rules[name], (*open_rules, name))
            self._regexes[name] = parser.whole
        return self._regexes[name]


class _Expressions:
    """Parses the right side of a rule."""

    def __init__(
        self, grammar: _Grammar, tokens: list[re.Match[str]], open_rules: tuple[str, ...]
    ) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._open_rules = open_rules
        self._position = 0

    @cached_property
    def whole(self) -> str:
        found = self._alternatives("")
        if len(found) > _MAX_CHARACTERS:
            raise _Unsupported(f"it has more than {_MAX_CHARACTERS:,} characters as an expression")
        return found

    def _peek(self) -> str:
        return self._tokens[self._position][0] if self._position < len(self._tokens) else ""

    def _alternatives(self, closer: str) -> str:
        found = [self._sequence()]
        while self._peek() == "|":
            self._position += 1
            found.append(self._sequence())
        if self._peek() != closer:
            raise _Unsupported(f"{self._peek() or 'the end'!r} is not expected")
        self._position += 1
        return f"(?:{'|'.join(found)})"

    def _sequence(self) -> str:
        parts = []
        while self._peek() not in ("", "|", ")", "]"):
            parts.append(self._item() + self._quantifier())
        return "".join(parts)

    def _item(self) -> str:
        token = self._tokens[self._position]
        self._position += 1
        if token[0] == "(":
            return self._alternatives(")")
        if token[0] == "[":
            return f"{self._alternatives(']')}?"
        if token["text"]:
            text = _SPECIAL.sub(r"\\\g<0>", _literal(token[0].removesuffix("i")))
            return f"(?i:{text})" if token[0].endswith("i") else f"(?:{text})"
        if token["regex"]:
            body, _, flags = token[0][1:].rpartition("/")
            body = body.replace("\\/", "/")
            return f"(?{flags}:{body})" if flags else f"(?:{body})"
        if token["name"]:
            return self._grammar.expand(token[0], self._open_rules)
        raise _Unsupported(f"{token[0]!r} is not expected")

    def _quantifier(self) -> str:
        if self._peek() in ("*", "+", "?"):
            self._position += 1
            return self._tokens[self._position - 1][0]
        token = self._tokens[self._position] if self._peek() else None
        if token is None or not token["repeat"]:
            return ""
        self._position += 1
        most = "" if token["most"] is None else f",{token['most']}"
        return f"{{{token['least']}{most}}}"


def _literal(token: str) -> str:
    try:
        return str(json.loads(token))
    except ValueError:
        raise _Unsupported(f"{token} has an escape that JSON has not") from None
