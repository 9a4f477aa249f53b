"""Structural tags of both forms: the texts that they allow, and the paths in their errors."""

from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.grammar.ascii_classes import with_ascii_classes
from headrace.structured_outputs import StructuredOutputs
from tests.server.test_reasoning_and_constraints import verdict

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
ARGUMENTS = '{"city": "Rome"}'
CALL = f"<function=weather>{ARGUMENTS}</function>"
OLD = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=time>", "schema": EMPTY, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def format_of(kind: str, **parts: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": kind, **parts}}


WEATHER = tag("<function=weather>", {"type": "json_schema", "json_schema": CITY}, "</function>")
NOTE = tag("[[", {"type": "any_text"}, "]]")
TRIGGERED = {"triggers": ["<function=", "[["], "tags": [WEATHER, NOTE]}
THINKING = tag("<think>", {"type": "any_text"}, "</think>")
ANSWERS = [
    {"type": "regex", "pattern": r"\d+/\d"},
    {"type": "const_string", "value": "none"},
]
CASES: list[tuple[dict[str, Any], str, str]] = [
    (OLD, "", "whole"),
    (OLD, "Hi", "whole"),
    (OLD, "a < b <func", "whole"),
    (OLD, f"Hi {CALL} and <function=time>{{}}</function>.", "whole"),
    (OLD, CALL.removesuffix("</function>"), "begun"),
    (OLD, "<function=other>", "refused"),
    (OLD, '<function=weather>{"town"', "refused"),
    (format_of("triggered_tags", **TRIGGERED), f"a [[b]] {CALL}", "whole"),
    (format_of("triggered_tags", **TRIGGERED), "a [[b", "begun"),
    (format_of("triggered_tags", **TRIGGERED, at_least_one=True), "a", "begun"),
    (format_of("triggered_tags", **TRIGGERED, at_least_one=True), f"a {CALL} b", "whole"),
    (format_of("triggered_tags", **TRIGGERED, stop_after_first=True), f"a {CALL}", "whole"),
    (format_of("triggered_tags", **TRIGGERED, stop_after_first=True), f"a {CALL}b", "refused"),
    (format_of("tags_with_separator", tags=[WEATHER, NOTE], separator=","), "", "whole"),
    (
        format_of("tags_with_separator", tags=[WEATHER, NOTE], separator=","),
        f"{CALL},[[b]]",
        "whole",
    ),
    (format_of("tags_with_separator", tags=[NOTE], separator=","), "[[a]][[b]]", "refused"),
    *(
        (format_of("sequence", elements=[THINKING, {"type": "or", "elements": ANSWERS}]), *case)
        for case in (
            ("<think>Hm</think>12/3", "whole"),
            ("<think>Hm</think>none", "whole"),
            ("<think>Hm</think>no", "begun"),
            ("<think>Hm</think>x", "refused"),
            ("12/3", "refused"),
        )
    ),
    (format_of("star", content=ANSWERS[1]), "nonenone", "whole"),
    (format_of("plus", content=ANSWERS[1]), "", "begun"),
    (format_of("optional", content=ANSWERS[1]), "nonenone", "refused"),
    (format_of("any_text"), "any\ntext", "whole"),
]


@pytest.mark.parametrize("with_control", [False, True])
@pytest.mark.parametrize(("value", "text", "result"), CASES)
def test_structural_tag(value: dict[str, Any], text: str, result: str, with_control: bool) -> None:
    control = ["<think>", "</think>", "[["] if with_control else []
    assert verdict(StructuredOutputs(structural_tag=value), text, control) == result


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "structural_tag.structures must be a list"),
        ("[", "structural_tag is not JSON"),
        (OLD | {"triggers": ["<tool"]}, r"structural_tag.structures\[0\].begin begins with no"),
        (OLD | {"triggers": "<"}, "structural_tag.triggers must be"),
        (
            OLD | {"structures": [{"begin": "<function=", "schema": {"type": "strin"}, "end": ""}]},
            r"structural_tag.structures\[0\].schema cannot be compiled",
        ),
        (
            OLD | {"structures": [{"begin": "<function=", "schema": {"not": {}}, "end": ""}]},
            r"structural_tag.structures\[0\].schema.not cannot be enforced",
        ),
        (format_of("xml"), "structural_tag.format.type 'xml' is not supported; use any_text"),
        (format_of("sequence", elements=[]), "structural_tag.format.elements must be"),
        (
            format_of("sequence", elements=[{"type": "const_string"}]),
            r"structural_tag.format.elements\[0\].value must be text",
        ),
    ],
)
def test_a_wrong_structural_tag_is_named(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        verdict(StructuredOutputs(structural_tag=value), "", [])


@pytest.mark.parametrize(
    ("expression", "text", "result"),
    [
        (r"\d{4}-\d{2}", "2026-11", "whole"),
        (r"\d", "\U0001fbf8", "refused"),
        (r"\w+", "é", "refused"),
        (r"[\w.]+", "a.b_1", "whole"),
        (r"a\sb", "a\u00a0b", "refused"),
        (r"a\sb", "a\tb", "whole"),
        (r"\D", "é", "whole"),
        (r"[^\d]", "é", "whole"),
        (r"[^\d]", "3", "refused"),
        (r"\\d", r"\d", "whole"),
    ],
)
def test_classes_of_an_expression_are_ascii(expression: str, text: str, result: str) -> None:
    assert verdict(StructuredOutputs(regex=expression), text, []) == result


def test_other_escapes_stay() -> None:
    assert with_ascii_classes(r"\\d\.\x41[\]]\S") == r"\\d\.\x41[\]][^ \t\n\r\f\v]"
