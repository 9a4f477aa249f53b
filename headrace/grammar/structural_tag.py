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
from headrace.grammar.lark import ANY_TEXT, Lark, quoted
from headrace.json_schema import enforceable

_KINDS = (
    "any_text, const_string, json_schema, optional, or, plus, regex, sequence, star, tag, "
    "tags_with_separator and triggered_tags"
)

Node = Mapping[str, Any]


def structural_tag_lark(
    text: str, field: str, control_tokens: Mapping[str, int]
) -> tuple[str, list[tuple[str, str]]]:
    """Return the Lark grammar of a structural tag, and its schemas with their fields.

    Raises RequestError, which names the path from `field` on.
    """
    tag = json.loads(text)
    lark = Lark(control_tokens)
    writer = _Writer(lark)
    if "format" in tag:
        start = writer.part(_mapping(tag, "format", field), f"{field}.format")
    else:
        start = writer.structures(tag, field)
    return lark.render(start), writer.schemas


class _Writer:
    def __init__(self, lark: Lark) -> None:
        self.schemas: list[tuple[str, str]] = []
        self._lark = lark

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
                return self._lark.rule(ANY_TEXT)
            case "const_string":
                return self._lark.text(_string(part, "value", field))
            case "json_schema":
                return self._json(_mapping(part, "json_schema", field), f"{field}.json_schema")
            case "schema":  # of the older form
                field = field.removesuffix(".content")
                return self._json(_mapping(part, "schema", field), f"{field}.schema")
            case "regex":
                pattern = _string(part, "pattern", field)
                check_cost("regex", pattern, f"{field}.pattern")
                escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", with_ascii_classes(pattern))
                return self._lark.rule("/" + escaped.replace("\n", r"\n") + "/")
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
            inner = " | ".join(map(self._lark.up_to, ends))
        else:
            after = " | ".join(map(self._lark.text, ends))
            inner = f"({self.part(content, f'{field}.content')}) ({after})"
        return f"{self._lark.text(begin)} ({inner})"

    def _triggered(self, part: Node, field: str, name: str) -> str:
        """Free text, in which each trigger begins one of the tags that begin with it."""
        triggers = part.get("triggers")
        if not isinstance(triggers, list) or not all(
            isinstance(trigger, str) and trigger for trigger in triggers
        ):
            raise RequestError(f"{field}.triggers must be a list of texts")
        tags = _list(part, name, field)
        spelt = [trigger for trigger in triggers if not self._lark.has_control_token(trigger)]
        free = self._lark.terminal(_without(spelt))
        begins = [_string(tag, "begin", f"{field}.{name}[{i}]") for i, tag in enumerate(tags)]
        heads: list[str] = []
        unused = set(range(len(tags)))
        for trigger in triggers:
            chosen = [i for i, begin in enumerate(begins) if begin.startswith(trigger)]
            unused -= set(chosen)
            if not chosen:
                continue
            if trigger in spelt:
                head = self._lark.terminal(f"{_without(spelt)} {quoted(trigger)}")
            else:
                head = f"{free} {self._lark.text(trigger)}"
            bodies = " | ".join(
                self._tag(tags[i], f"{field}.{name}[{i}]", begins[i][len(trigger) :])
                for i in chosen
            )
            heads.append(self._lark.rule(f"{head} ({bodies})"))
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
        one = self._lark.rule(tags)
        separator = self._lark.text(_string(part, "separator", field))
        more = "" if part.get("stop_after_first") else f" ({separator} {one})*"
        return f"{one}{more}" if part.get("at_least_one") else f"({one}{more})?"

    def _json(self, schema: Node, field: str) -> str:
        check_cost("json", json.dumps(schema), field)
        found = enforceable(schema, field).schema
        self.schemas.append((field, json.dumps(found)))
        return self._lark.json(found)


def _without(texts: Sequence[str]) -> str:
    """A terminal of text in which none of the texts is."""
    if not texts:
        return ANY_TEXT
    # Lark writes "/" as "\/".
    found = "|".join(re.escape(text).replace("/", r"\/") for text in texts)
    return f"({ANY_TEXT} & ~/(?s:.*)({found})(?s:.*)/)"


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
