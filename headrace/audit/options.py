"""Probes of options of a request: alone and in a crowd, and the promise of each option."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.audit.answers import Answer
from headrace.audit.client import NotOfferedError
from headrace.audit.compare import (
    Finding,
    Result,
    compare_texts,
    differs,
    equal,
    not_offered,
    shown,
)
from headrace.audit.context import GREEDY, Context, Fields

_SCHEMA = {
    "type": "object",
    "properties": {"river": {"type": "string"}, "length": {"type": "integer"}},
    "required": ["river", "length"],
    "additionalProperties": False,
}
_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "river", "schema": _SCHEMA, "strict": True},
}
OPTIONS: Mapping[str, Fields] = {
    "min_p": {"min_p": 0.1},
    "top_p and top_k": {"top_p": 0.9, "top_k": 40},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"5": -100, "7": 2, "9": -3.5}},
    "stop": {"stop": [".", "e "]},
    "n = 2": {"n": 2},
    "JSON schema": {"response_format": _FORMAT},
}
"""Sampled requests whose answers must not depend on other requests."""
_MAX_TOKENS = 5
_STOP_CHARACTERS = 3
"""Max characters of the stop string; a stop of the first character would leave no text."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no text, so no stop string can name them."""


async def under_load(context: Context) -> Sequence[Finding]:
    """Send a request with each option alone, then all of them at once among others."""
    requests = {
        name: {"temperature": 1, "seed": 20 + number, **fields}
        for number, (name, fields) in enumerate(OPTIONS.items())
    }
    findings: dict[str, Finding] = {}
    alone: dict[str, Answer] = {}
    for name, fields in requests.items():
        try:
            answer = await context.ask(fields)
        except NotOfferedError as error:
            findings[name] = not_offered(str(error))
            continue
        if problem := _unserved(name, answer):
            findings[name] = not_offered(problem)
        else:
            alone[name] = answer
    crowd = await context.in_crowd([requests[name] for name in alone])
    for (name, expected), actual in zip(alone.items(), crowd, strict=True):
        findings[name] = compare_texts(expected.outputs, actual.outputs)
    return [findings[name] for name in OPTIONS]


def _unserved(name: str, answer: Answer) -> str:
    """The sign that the server ignores the option; empty if there is none."""
    if name == "n = 2" and len(answer.outputs) != 2:
        return f"n = 2 gives {len(answer.outputs)} outputs"
    text = answer.output.text.lstrip()
    if name != "JSON schema":
        return ""
    if not text.startswith("{"):
        return f"the answer {shown(text)} is no JSON"
    if answer.output.finish_reason == "stop":
        try:
            json.loads(text)
        except ValueError:
            return f"the answer {shown(text)} is no JSON"
    return ""


async def stop_strings(context: Context) -> Sequence[Finding]:
    """Stop at a string from the middle of the greedy text, whole and streamed."""
    text = context.first.output.text
    if not (stop := _stop_string(text)):
        return [not_offered("the greedy text has no string to stop at")]
    fields = {**GREEDY, "stop": [stop]}
    streamed, _ = await context.stream(fields)
    for way, answer in (("whole", await context.ask(fields)), ("streamed", streamed)):
        expected = text[: text.index(stop)]
        found = answer.output
        if found.text != expected:
            return [differs(f"{way}: {shown(found.text[-40:])}, not {shown(expected[-40:])}")]
        if found.finish_reason != "stop":
            return [differs(f"{way}: finish_reason {found.finish_reason!r}, not 'stop'")]
    return [equal()]


def _stop_string(text: str) -> str:
    """A few characters from the middle of a text; empty if there are none."""
    middle = len(text) // 2
    for size in range(_STOP_CHARACTERS, 0, -1):
        for start in (*range(middle, len(text) - size), *range(1, middle)):
            stop = text[start : start + size]
            if stop.strip() == stop and stop.isprintable() and _BROKEN not in stop:
                return stop
    return ""


async def max_tokens(context: Context) -> Sequence[Finding]:
    """Ask for a few tokens: no more come, and they begin the longer greedy answer."""
    answer = await context.ask({**GREEDY, "max_tokens": _MAX_TOKENS})
    output, first = answer.output, context.first.output
    count = answer.usage.completion_tokens if answer.usage else len(output.tokens)
    if max(count, len(output.tokens)) > _MAX_TOKENS:
        return [differs(f"{max(count, len(output.tokens))} tokens, not {_MAX_TOKENS}")]
    if count == _MAX_TOKENS and output.finish_reason != "length":
        is_whole = output.text == first.text
        if not is_whole:
            return [differs(f"finish_reason {output.finish_reason!r}, not 'length'")]
    expected = [token.text for token in first.tokens[: len(output.tokens)]]
    if [token.text for token in output.tokens] != expected:
        return [differs(f"{shown(output.text)} does not begin {shown(first.text)}")]
    return [equal()]


async def unknown_field(context: Context) -> Sequence[Finding]:
    """Send a field that no API has."""
    unknown: dict[str, Any] = {**GREEDY, "headrace_audit": 1}
    try:
        answer = await context.ask(unknown)
    except NotOfferedError as error:
        return [Finding(result=Result.NOTED, detail=f"refused, status {error.status}")]
    same = compare_texts(context.first.outputs, answer.outputs)
    detail = "ignored" if same.result is Result.EQUAL else "ignored, but the answer differs"
    return [Finding(result=Result.NOTED, detail=detail)]
