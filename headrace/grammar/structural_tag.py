"""Structural tags as Lark: text with parts between tags that have a schema.

Both forms of vLLM and xgrammar are read: `structures` with `triggers`, and `format`, a tree of
parts (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import RequestError
from headrace.grammar.ascii_classes import with_ascii_classes
from headrace.grammar.cost import check_cost
from headrace.json_schema import enforceable

_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_KINDS = (
    "any_text, const_string, json_schema, optional, or, plus, regex, sequence, star, tag, "
    "tags_with_separator and triggered_tags"
)
_ANY = "/(?s:.*)/"

Node = Mapping[str, Any]


def structural_tag_lark(
    text: str, field: str, control_tokens: Mapping[str, int]
) -> tuple[str, list[tuple[str, str]]]:
    """Return the Lark grammar of a structural tag, and its schemas with their fields.

    Raises RequestError, which names the path from `field` on.
    """
    tag = json.loads(text)
    writer = _Writer(control_tokens)
    if "format" in tag:
        start = writer.part(_mapping(tag, "format", field), f"{field}.format")
    else:
        start = writer.structures(tag, field)
    return "\n".join((f"start: {start}", *writer.rules)) + "\n", writer.schemas


class _Writer:
    def __init__(self, control_tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.schemas: list[tuple[str, str]] = []
        self._control_tokens = control_tokens
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def structures(self, tag: Node, field: str) -> str:
        """The older form: each structure has `begin`, `schema` and `end`."""
        tags = [
            {
                "begin": item.get("begin"),
                "content": {"type": "schema", "schema": item.get("schema", {})},
                "end": item.get("end"),
            }
            for item in _list(tag, "structures", field)
        ]
        part = {"structures": tags, "triggers": tag.get("triggers")}
        return self._triggered(part, field, "structures")

    def part(self, part: Node, field: str) -> str:
        kind = part.get("type")
        match kind:
            case "any_text":
                return self._rule(_ANY)
            case "const_string":
                return self._text(_string(part, "value", field))
            case "json_schema":
                return self._json(_mapping(part, "json_schema", field), f"{field}.json_schema")
            case "schema":  # of the older form
                field = field.removesuffix(".content")
                return self._json(_mapping(part, "schema", field), f"{field}.schema")
            case "regex":
                pattern = _string(part, "pattern", field)
                check_cost("regex", pattern, f"{field}.pattern")
                escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", with_ascii_classes(pattern))
                return self._rule("/" + escaped.replace("\n", r"\n") + "/")
            case "sequence":
                return " ".join(f"({item})" for item in self._elements(part, field))
            case "or":
                return " | ".join(f"({item})" for item in self._elements(part, field))
            case "optional" | "star" | "plus":
                sign = {"optional": "?", "star": "*", "plus": "+"}[str(kind)]
                inner = self.part(_mapping(part, "content", field), f"{field}.content")
                return f"({inner}){sign}"
            case "tag":
                return self._tag(part, field)
            case "triggered_tags":
                return self._triggered(part, field, "tags")
            case "tags_with_separator":
                return self._separated(part, field)
        raise RequestError(f"{field}.type {kind!r} is not supported; use {_KINDS}")

    def _elements(self, part: Node, field: str) -> list[str]:
        return [
            self.part(item, f"{field}.elements[{i}]")
            for i, item in enumerate(_list(part, "elements", field))
        ]

    def _tag(self, tag: Node, field: str, begin: str | None = None) -> str:
        """A tag; `begin` is the rest of its beginning, if a trigger has written the first part."""
        begin = _string(tag, "begin", field) if begin is None else begin
        ends = tag.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not all(isinstance(end, str) for end in ends) or not ends:
            raise RequestError(f"{field}.end must be text")
        content = _mapping(tag, "content", field)
        if content.get("type") == "any_text":
            inner = " | ".join(map(self._up_to, ends))
        else:
            after = " | ".join(map(self._text, ends))
            inner = f"({self.part(content, f'{field}.content')}) ({after})"
        return f"{self._text(begin)} ({inner})"

    def _triggered(self, part: Node, field: str, name: str) -> str:
        """Free text, in which each trigger begins one of the tags that begin with it."""
        triggers = part.get("triggers")
        if not isinstance(triggers, list) or not all(
            isinstance(trigger, str) and trigger for trigger in triggers
        ):
            raise RequestError(f"{field}.triggers must be a list of texts")
        tags = _list(part, name, field)
        spelt = [trigger for trigger in triggers if not self._marker.search(trigger)]
        free = self._terminal(_without(spelt))
        begins = [_string(tag, "begin", f"{field}.{name}[{i}]") for i, tag in enumerate(tags)]
        heads: list[str] = []
        unused = set(range(len(tags)))
        for trigger in triggers:
            chosen = [i for i, begin in enumerate(begins) if begin.startswith(trigger)]
            unused -= set(chosen)
            if not chosen:
                continue
            if trigger in spelt:
                head = self._terminal(f"{_without(spelt)} {_quoted(trigger)}")
            else:
                head = f"{free} {self._text(trigger)}"
            bodies = " | ".join(
                self._tag(tags[i], f"{field}.{name}[{i}]", begins[i][len(trigger) :])
                for i in chosen
            )
            heads.append(self._rule(f"{head} ({bodies})"))
        if unused:
            raise RequestError(f"{field}.{name}[{min(unused)}].begin begins with no trigger")
        either, is_one = " | ".join(heads), bool(part.get("stop_after_first"))
        if is_one:
            return either if part.get("at_least_one") else f"{either} | {free}"
        return f"({either}){'+' if part.get('at_least_one') else '*'} {free}"

    def _separated(self, part: Node, field: str) -> str:
        tags = " | ".join(
            self._tag(tag, f"{field}.tags[{i}]") for i, tag in enumerate(_list(part, "tags", field))
        )
        one = self._rule(tags)
        separator = self._text(_string(part, "separator", field))
        more = "" if part.get("stop_after_first") else f" ({separator} {one})*"
        return f"{one}{more}" if part.get("at_least_one") else f"({one}{more})?"

    def _json(self, schema: Node, field: str) -> str:
        check_cost("json", json.dumps(schema), field)
        found = enforceable(schema, field).schema
        self.schemas.append((field, json.dumps(found)))
        own = found.get("x-guidance")
        style = {**_STYLE, **(own if isinstance(own, Mapping) else {})}
        return self._rule(f"%json {json.dumps({**found, 'x-guidance': style})}")

    def _text(self, text: str) -> str:
        parts, position = [], 0
        for match in self._marker.finditer(text):
            parts.append(_quoted(text[position : match.start()]))
            parts.append(f"<[{self._control_tokens[match[0]]}]>")
            position = match.end()
        parts.append(_quoted(text[position:]))
        return " ".join(filter(None, parts)) or '""'

    def _up_to(self, end: str) -> str:
        if not end:
            return self._rule(_ANY)
        if self._marker.search(end):
            return f"{self._rule(_ANY)} {self._text(end)}"
        return self._rule(_ANY, f"[suffix={_quoted(end)}]")

    def _rule(self, body: str, options: str = "") -> str:
        name = f"s{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"S{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name


def _without(texts: Sequence[str]) -> str:
    """A terminal of text in which none of the texts is."""
    if not texts:
        return _ANY
    # Lark writes "/" as "\/".
    found = "|".join(re.escape(text).replace("/", r"\/") for text in texts)
    return f"({_ANY} & ~/(?s:.*)({found})(?s:.*)/)"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _read(kind: type, name: str) -> Callable[[Node, str, str], Any]:
    def read(part: Node, key: str, field: str) -> Any:
        value = part.get(key) if isinstance(part, Mapping) else None
        if not isinstance(value, kind):
            raise RequestError(f"{field}.{key} must be {name}")
        return value

    return read


_string: Callable[[Node, str, str], str] = _read(str, "text")
_mapping: Callable[[Node, str, str], Node] = _read(dict, "an object")


def _list(part: Node, key: str, field: str) -> list[Node]:
    value = part.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        raise RequestError(f"{field}.{key} must be a list of objects, with at least one")
    return value
