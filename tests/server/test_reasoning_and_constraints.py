"""Restricted text begins after the reasoning: every restriction, API and reasoning format."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.constraint import mask_words
from headrace.engine.stops import AnswerFinder
from headrace.grammar.grammars import Grammars
from headrace.server.output_parsers.formats import TOOL_CALL_FORMATS
from headrace.server.output_parsers.parser import OutputFormat
from headrace.server.output_parsers.reasoning_formats import REASONING_FORMATS
from headrace.server.output_parsers.tool_grammar import answer_envelope
from headrace.structured_outputs import StructuredOutputs
from tests.server.output_parsers.samples import TOOLS, deltas, style, summary
from tests.server.output_parsers.test_tool_grammar import EXAMPLES, Bytes, control_tokens
from tests.server.running import Running
from tests.server.scripted_model import ScriptedModel
from tests.server.test_messages_and_responses import named

ANSWER = '{"n": 3}'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "name": "digit", "schema": SCHEMA}
GRAMMAR = 'start: "{" rest\nrest: /"n": [0-9]}/'
CHAT: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "d", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json_object": True}},
    {"structured_outputs": {"regex": r'\{"n": [0-9]\}'}},
    {"structured_outputs": {"choice": [ANSWER, "none"]}},
    {"structured_outputs": {"grammar": GRAMMAR}},
    {"structured_outputs": {"grammar": 'root ::= "{" rest\nrest ::= "\\"n\\": " [0-9] "}"'}},
    {"guided_json": SCHEMA},
    {"guided_regex": r'\{"n": [0-9]\}'},
    {"guided_choice": [ANSWER, "none"]},
    {"guided_grammar": GRAMMAR},
]
BEGUN, POSSIBLE, WRONG, CLOSED = range(4)
TEXTS = [
    f"Is it {{1}}? No.</think>\n\n{ANSWER}",
    f"<think>Hm.</think>\n{ANSWER}",
    "Hm.</think>\nIt is three.",
    f"<think>Hm.</think>\n{ANSWER}",
    "x" * 60,  # so that each prompt leaves 60 tokens
]
ENDS = ["<think>\n", "", "<think>\n", "<think>\n\n</think>\n\n"]
"""Ends of the prompts that make the model say the texts."""
EXPECTED = [("Is it {1}? No.", ANSWER), ("Hm.", ANSWER)]


class Thinking:
    """A server whose model reasons before it answers."""

    def __init__(self, path: Any) -> None:
        template = "{{ messages[-1].content }}{% if false %}<think></think>{% endif %}"
        self.model = ScriptedModel(path / "thinking.gguf", TEXTS, template=template)
        self.server = Running(str(self.model.path), "--threads", "1", "--kv-blocks", "64")

    def message(self, which: int) -> dict[str, Any]:
        text = "x" * (self.model.starts[which] - len(ENDS[which])) + ENDS[which]
        return {"role": "user", "content": text}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        reply = self.server.post(path, {"temperature": 0} | body)
        assert reply.status == 200, reply.body
        return reply

    def chat(self, which: int, **more: Any) -> tuple[str | None, str | None, str]:
        """Reasoning, content and finish reason; the stream has the same."""
        body = {"messages": [self.message(which)], "max_tokens": 60} | more
        choice = self.post("/v1/chat/completions", body).json["choices"][0]
        message = choice["message"]
        pieces = {"reasoning": "", "content": ""}
        events = self.post("/v1/chat/completions", body | {"stream": True}).events[:-1]
        for event in events:
            for name, text in event["choices"][0]["delta"].items():
                if name in pieces:
                    pieces[name] += text or ""
        found = message.get("reasoning"), message["content"]
        assert found == (pieces["reasoning"] or None, pieces["content"] or None)
        return (*found, choice["finish_reason"])


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinking]:
    found = Thinking(tmp_path_factory.mktemp("thinking"))
    try:
        yield found
    finally:
        assert found.server.stop() == 0


@pytest.mark.parametrize("more", CHAT, ids=str)
@pytest.mark.parametrize("which", [BEGUN, POSSIBLE])
def test_restricted_text_follows_the_reasoning(
    thinking: Thinking, which: int, more: dict[str, Any]
) -> None:
    assert thinking.chat(which, **more) == (*EXPECTED[which], "stop")


def test_the_text_after_the_reasoning_is_restricted(thinking: Thinking) -> None:
    for more in CHAT[:1] + CHAT[2:3] + CHAT[4:]:
        reasoning, content, reason = thinking.chat(WRONG, **more)
        assert (reasoning, reason) == ("Hm.", "stop")
        assert content == "none" or 0 <= json.loads(content or "")["n"] <= 9


@pytest.mark.parametrize(
    ("which", "more"),
    [
        (CLOSED, {}),
        (POSSIBLE, {"chat_template_kwargs": {"enable_thinking": False}}),
        (POSSIBLE, {"reasoning_effort": "none"}),
        (POSSIBLE, {"thinking": {"type": "disabled"}}),
    ],
    ids=str,
)
def test_ended_reasoning_does_not_begin_again(
    thinking: Thinking, which: int, more: dict[str, Any]
) -> None:
    reasoning, content, reason = thinking.chat(which, **CHAT[0], **more)
    assert (reasoning, reason, list(json.loads(content or ""))) == (None, "stop", ["n"])


def test_reasoning_that_max_tokens_cuts(thinking: Thinking) -> None:
    assert thinking.chat(BEGUN, **CHAT[0], max_tokens=5) == ("Is it", None, "length")


@pytest.mark.parametrize("which", [BEGUN, POSSIBLE])
def test_a_budget_of_reasoning_leaves_the_restricted_text(thinking: Thinking, which: int) -> None:
    reasoning, content, reason = thinking.chat(which, **CHAT[0], thinking_token_budget=2)
    assert (reasoning, reason) == (EXPECTED[which][0][:2], "stop")
    assert 0 <= json.loads(content or "")["n"] <= 9


def test_a_continued_message_within_reasoning(thinking: Thinking) -> None:
    """The reasoning that the last message begins goes on."""
    begun = "<think>Let me see: "
    text = "x" * (thinking.model.starts[BEGUN] - len(begun))
    body = {
        "messages": [{"role": "assistant", "content": begun + text}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": 60,
    }
    message = thinking.post("/v1/chat/completions", body | CHAT[0]).json["choices"][0]["message"]
    assert message["reasoning"].endswith("it {1}? No.") and message["content"] == ANSWER


STOPS: list[tuple[int, str, str | None, str | None]] = [
    (BEGUN, "{1}", EXPECTED[BEGUN][0], ANSWER),  # it is in the reasoning alone
    (BEGUN, "{", EXPECTED[BEGUN][0], None),
    (BEGUN, " ", EXPECTED[BEGUN][0], '{"n":'),
    (BEGUN, "\n", EXPECTED[BEGUN][0], ANSWER),  # white space before the answer
    (BEGUN, "</think>", EXPECTED[BEGUN][0], ANSWER),
    (POSSIBLE, "H", "Hm.", ANSWER),
    (POSSIBLE, "3", "Hm.", '{"n": '),
    (WRONG, "t", "Hm.", "I"),
    (CLOSED, "Hm", "Hm.", ANSWER),  # the model begins it again
]


@pytest.mark.parametrize("thinks", [*REASONING_FORMATS, "harmony"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_markers_before_the_answer(thinks: str, has_begun: bool) -> None:
    is_harmony = thinks == "harmony"
    output_format = style("harmony" if is_harmony else "hermes", None if is_harmony else thinks)
    markers = output_format.reasoning_markers(has_begun)
    assert markers is not None
    before = f"{'' if has_begun else markers.begin}Hm.{markers.end}\n{markers.opener}"
    found = [AnswerFinder(markers).push(f"{before}{text}") for text in ("yes", "")]
    assert found == [(before, "yes"), (before, "")]


@pytest.mark.parametrize(("which", "stop", "reasoning", "content"), STOPS)
def test_stop_texts_hold_in_the_answer_alone(
    thinking: Thinking, which: int, stop: str, reasoning: str | None, content: str | None
) -> None:
    assert thinking.chat(which, stop=[stop]) == (reasoning, content, "stop")
    kept = f"{content or ''}{stop}" if content != ANSWER else content
    included = thinking.chat(which, stop=[stop], include_stop_str_in_output=True)
    assert included == (reasoning, kept, "stop")
    message, limit = thinking.message(which), 60
    for stream in (False, True):
        body: dict[str, Any] = {"messages": [message], "max_tokens": limit, "stream": stream}
        reply = thinking.post("/v1/messages", body | {"stop_sequences": [stop]})
        reason = "end_turn" if content == ANSWER else "stop_sequence"
        assert f'"stop_reason":"{reason}"'.encode() in reply.body
        body = {"input": [message], "max_output_tokens": limit, "stream": stream, "stop": [stop]}
        reply = thinking.post("/v1/responses", body)
        response = named(reply)[-1][1]["response"] if stream else reply.json
        texts = {item["type"]: item["content"][0]["text"] for item in response["output"]}
        assert (texts["reasoning"], texts.get("message")) == (reasoning, content)


@pytest.mark.parametrize("which", [BEGUN, POSSIBLE])
@pytest.mark.parametrize("stream", [False, True])
def test_restricted_text_of_the_other_apis(thinking: Thinking, which: int, stream: bool) -> None:
    message = thinking.message(which)
    body: dict[str, Any] = {"input": [message], "max_output_tokens": 60, "stream": stream}
    reply = thinking.post("/v1/responses", body | {"text": {"format": NAMED}})
    response = named(reply)[-1][1]["response"] if stream else reply.json
    kinds = {item["type"]: item["content"][0]["text"] for item in response["output"]}
    assert kinds == dict(zip(("reasoning", "message"), EXPECTED[which], strict=True))
    assert response["status"] == "completed"

    body = {"messages": [message], "max_tokens": 60, "stream": stream}
    body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    reply = thinking.post("/v1/messages", body)
    if not stream:
        blocks = [(item["type"], item[item["type"]]) for item in reply.json["content"]]
        assert blocks == list(zip(("thinking", "text"), EXPECTED[which], strict=True))
        return
    pieces = {"thinking": "", "text": ""}
    for _, event in named(reply):
        delta = event.get("delta", {})
        for name in pieces:
            pieces[name] += delta.get(name, "")
    assert tuple(pieces.values()) == EXPECTED[which]


class Letters:
    """The vocabulary of `Bytes` for grammars."""

    def __init__(self, control: list[str]) -> None:
        self.bytes = Bytes(control)
        self.special_ids = frozenset(self.bytes.special_token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.bytes.tokens[token_id]

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return list(text.encode())


def verdict(outputs: StructuredOutputs, text: str, control: list[str]) -> str:
    """Whether a grammar allows a text: `whole`, `begun` or `refused`."""
    letters = Letters(control)
    size = len(letters.bytes.tokens)
    state = Grammars(letters, size).compile(outputs)
    for token in letters.bytes.encode(text):
        mask = np.zeros(mask_words(size), np.uint32)
        state.fill(mask)
        if not mask[token // 32] >> np.uint32(token % 32) & 1:
            return "refused"
        state.advance(token)
    return "whole" if state.is_complete else "begun"


RESTRICTIONS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"json_object": True},
    {"regex": r'\{"n": [0-9]\}'},
    {"choice": [ANSWER, "none"]},
    {"grammar": GRAMMAR},
]


@pytest.mark.parametrize("restriction", RESTRICTIONS, ids=lambda item: next(iter(item)))
@pytest.mark.parametrize("with_control", [False, True])
@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_every_reasoning_format(name: str, with_control: bool, restriction: dict[str, Any]) -> None:
    reasoning = REASONING_FORMATS[name]
    output_format = OutputFormat(None, reasoning)
    control = list(reasoning.markers) if with_control else []

    def allows(text: str, state: Any) -> str:
        envelope = answer_envelope(output_format, state, Bytes(control).control)
        return verdict(StructuredOutputs(**restriction, envelope=envelope), text, control)

    answers = [ANSWER]
    if reasoning.rest_begin:
        answers.append(f"{reasoning.rest_begin}{ANSWER}{reasoning.rest_end}")
    for answer in answers:
        thought = f"Hm {{}}.{reasoning.end}\n\n{answer}"
        for state, text, result in (
            ("begun", thought, "whole"),
            ("begun", ANSWER, "begun"),
            ("possible", reasoning.begin + thought, "whole"),
            ("possible", answer, "whole"),
            ("possible", f"Hm. {answer}", "refused"),
            ("closed", answer, "whole"),
            ("closed", reasoning.begin + thought, "refused"),
        ):
            assert allows(text, state) == result, (state, text)
            if result == "whole":
                parser = output_format.parser(in_reasoning=state == "begun")
                expected = [("reasoning", "Hm {}.")] if text.endswith(thought) else []
                found = summary(deltas(parser, list(text)))
                assert found == [*expected, ("content", ANSWER)]


@pytest.mark.parametrize("with_control", [False, True])
def test_restricted_text_in_channels(with_control: bool) -> None:
    control = control_tokens("harmony") if with_control else []
    output_format = style("harmony")
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    for state, text, result in (
        ("possible", analysis + final + ANSWER, "whole"),
        ("possible", f"{final}{ANSWER}", "whole"),
        ("possible", f"<|channel|>final <|constrain|>json<|message|>{ANSWER}", "whole"),
        ("possible", f"{final}It is", "refused"),
        ("closed", analysis, "refused"),
    ):
        envelope = answer_envelope(output_format, state, Bytes(control).control)  # type: ignore[arg-type]
        outputs = StructuredOutputs(json=SCHEMA, envelope=envelope)
        assert verdict(outputs, text, control) == result, text
        if result == "whole":
            found = summary(deltas(output_format.parser(), list(text)))
            assert found[-1] == ("content", ANSWER)


@pytest.mark.parametrize("format_", TOOL_CALL_FORMATS)
@pytest.mark.parametrize("thinks", [None, "think", "command"])
@pytest.mark.parametrize("with_control", [False, True])
def test_a_call_may_take_the_place_of_restricted_text(
    format_: str, thinks: str | None, with_control: bool
) -> None:
    """In the mode `auto` the output is the restricted text, or calls."""
    is_harmony = format_ == "harmony"
    output_format = style(format_, None if is_harmony else thinks)
    control = control_tokens(format_) if with_control else []
    envelope = answer_envelope(output_format, "possible", Bytes(control).control, TOOLS)
    outputs = StructuredOutputs(json=SCHEMA, envelope=envelope)
    calls, answer = EXAMPLES[format_], ANSWER
    thought = ""
    if is_harmony:
        answer = f"<|channel|>final<|message|>{ANSWER}"
    elif thinks:
        marks = REASONING_FORMATS[thinks]
        thought = f"{marks.begin}Hm.{marks.end}\n"
    for text, result in (
        (calls, "whole"),
        (answer, "whole"),
        (thought + calls, "whole"),
        (thought + answer, "whole"),
        ("It is", "refused"),
        (answer + calls, "refused"),
        (calls.replace("get_weather", "other"), "refused"),
    ):
        assert verdict(outputs, text, control) == result, text
    found = summary(deltas(output_format.parser(tools=TOOLS), list(calls)))
    assert [kind for kind, *_ in found] == ["call"] * len(found)


def test_an_error_names_the_restriction_and_not_the_envelope() -> None:
    envelope = answer_envelope(OutputFormat(None, REASONING_FORMATS["think"]), "possible", {})
    for restriction, message in (
        ({"grammar": "start: missing"}, "grammar cannot be compiled"),
        ({"regex": "(a"}, "regex cannot be compiled"),
        ({"json": {"type": "strin"}}, "json cannot be compiled"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            verdict(StructuredOutputs(**restriction, envelope=envelope), "", [])  # type: ignore[arg-type]
        assert "think" not in str(error.value)
