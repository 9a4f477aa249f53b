"""Every output format from end to end: a model says it, and official clients read the response."""

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from headrace.server.output_parsers.formats import _DETECTED
from headrace.server.output_parsers.reasoning_formats import REASONING_FORMATS
from tests.server.output_parsers.samples import SAMPLES, TOOLS, Expected, Sample
from tests.server.running import Running
from tests.server.scripted_model import END, ScriptedModel

Formats = tuple[str | None, str | None]

_TEMPLATE_TEXTS = {tool_call_format.name: texts for tool_call_format, texts in _DETECTED}
_MARKERS = {
    tool_call_format.name: (*tool_call_format.openers, *tool_call_format.markers)
    for tool_call_format, _ in _DETECTED
}
_ENDS = {"harmony": ("<|return|>", "<|call|>")}
_FUNCTIONS: list[Any] = [
    {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
    for tool in TOOLS
]


def _formats(sample: Sample) -> Formats:
    return sample.format, sample.thinking


def _is_said_at_once(sample: Sample) -> bool:
    """Whether an end token ends the text, if it has one."""
    ends = _ENDS.get(sample.format or "", ())
    return not any(end in sample.text.removesuffix(end) for end in ends)


GROUPS = {
    formats: [sample for sample in samples if _is_said_at_once(sample)]
    for formats, samples in groupby(
        sorted(SAMPLES, key=lambda sample: tuple(map(str, _formats(sample)))), _formats
    )
    if formats != (None, None)
}


class Scripted:
    """A server whose model says the samples of one format, and clients of it."""

    def __init__(self, folder: Path, formats: Formats) -> None:
        tool_calls, thinking = formats
        reasoning = REASONING_FORMATS[thinking].markers if thinking else ()
        markers = (*_MARKERS.get(tool_calls or "", ()), *reasoning)
        texts = (*_TEMPLATE_TEXTS.get(tool_calls or "", ()), *reasoning)
        self.samples = GROUPS[formats]
        self.tools = _FUNCTIONS if tool_calls else []
        self.model = ScriptedModel(
            folder / "scripted.gguf",
            [sample.text for sample in self.samples],
            control_tokens=[marker for marker in markers if marker.startswith(("<|", "<｜", "["))],
            ends=_ENDS.get(tool_calls or "", (END,)),
            # A model's template names the markers of its format, which is how it is detected.
            template="{{ messages[-1].content }}{% if false %}" + " ".join(texts) + "{% endif %}",
        )
        self.server = Running(str(self.model.path), "--threads", "1", "--kv-blocks", "128")
        url = f"http://127.0.0.1:{self.server.port}"
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def prompt(self, index: int) -> str:
        """Return the prompt that makes the model say the sample."""
        end = "<think>" if self.samples[index].in_reasoning else ""
        return "x" * (self.model.starts[index] - len(end)) + end

    def stop(self) -> None:
        self.openai.close()
        self.anthropic.close()
        assert self.server.stop() == 0, "".join(self.server.log)


@pytest.fixture(scope="module", params=GROUPS, ids=lambda formats: "-".join(filter(None, formats)))
def scripted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scripted]:
    server = Scripted(tmp_path_factory.mktemp("scripted"), request.param)
    try:
        yield server
    finally:
        server.stop()


def _message(reasoning: str, content: str, calls: list[tuple[str, Any]]) -> dict[str, Any]:
    return {"reasoning": reasoning, "content": content, "calls": calls}


def _expected(expected: Expected) -> dict[str, Any]:
    def text_of(kind: str) -> str:
        return "".join(item[1] for item in expected if item[0] == kind)

    calls = [(item[1], json.loads(item[2])) for item in expected if item[0] == "call"]
    return _message(text_of("reasoning"), text_of("content"), calls)


def _of_chat(message: Any) -> dict[str, Any]:
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or ()
    ]
    return _message(getattr(message, "reasoning", None) or "", message.content or "", calls)


def _chat(scripted: Scripted, index: int, options: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": scripted.prompt(index)}]
    tools = {"tools": scripted.tools} if scripted.tools else {}
    options = options | {"model": "scripted.gguf", "messages": messages, **tools}
    completion = scripted.openai.chat.completions.create(**options)
    message, reason = completion.choices[0].message, completion.choices[0].finish_reason
    assert reason == ("tool_calls" if message.tool_calls else "stop")

    reasoning, content, calls = "", "", {}
    for chunk in scripted.openai.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                name, arguments = calls.get(call.index, ("", ""))
                function = call.function
                calls[call.index] = (
                    name + (function.name or ""),
                    arguments + (function.arguments or ""),
                )
    streamed = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    assert _message(reasoning, content, streamed) == _of_chat(message)
    return _of_chat(message)


def _of_response(response: Any) -> dict[str, Any]:
    reasoning = [
        part.text
        for item in response.output
        if item.type == "reasoning"
        for part in item.content or ()
    ]
    calls = [
        (item.name, json.loads(item.arguments))
        for item in response.output
        if item.type == "function_call"
    ]
    return _message("".join(reasoning), response.output_text, calls)


def _responses(scripted: Scripted, index: int, options: dict[str, Any]) -> dict[str, Any]:
    tools = [{**tool["function"], "type": "function", "strict": False} for tool in scripted.tools]
    options = {
        "model": "scripted.gguf",
        "input": scripted.prompt(index),
        "tools": tools,
        "max_output_tokens": options["max_tokens"],
    }
    whole = _of_response(scripted.openai.responses.create(**options))
    with scripted.openai.responses.stream(**options) as stream:
        stream.until_done()
        assert _of_response(stream.get_final_response()) == whole
    return whole


def _of_message(message: Any) -> dict[str, Any]:
    blocks = message.content
    return _message(
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        "".join(block.text for block in blocks if block.type == "text"),
        [(block.name, block.input) for block in blocks if block.type == "tool_use"],
    )


def _messages(scripted: Scripted, index: int, options: dict[str, Any]) -> dict[str, Any]:
    tools = [
        {"name": tool.name, "input_schema": {"type": "object", **tool.parameters}}
        for tool in (TOOLS if scripted.tools else ())
    ]
    messages = [{"role": "user", "content": scripted.prompt(index)}]
    options = options | {"model": "scripted.gguf", "messages": messages, "tools": tools}
    whole = _of_message(scripted.anthropic.messages.create(**options))
    with scripted.anthropic.messages.stream(**options) as stream:
        assert _of_message(stream.get_final_message()) == whole
    return whole


@pytest.mark.parametrize("api", [_chat, _responses, _messages], ids=lambda api: api.__name__[1:])
def test_output_of_a_format(scripted: Scripted, api: Any) -> None:
    for index, sample in enumerate(scripted.samples):
        found = api(scripted, index, {"max_tokens": scripted.model.lengths[index]})
        assert found == _expected(sample.expected), sample.text
