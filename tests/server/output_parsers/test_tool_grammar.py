"""Grammars of tool calls: llguidance compiles them, and they accept only the formats' text."""

import json
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from headrace.server.output_parsers import lark
from headrace.server.output_parsers.formats import TOOL_CALL_FORMATS
from headrace.server.output_parsers.reasoning_formats import REASONING_FORMATS
from headrace.server.output_parsers.text_reader import SPACE
from headrace.server.output_parsers.tool_grammar import tool_grammar
from headrace.server.output_parsers.tools import Tool, ToolChoice
from tests.server.output_parsers.samples import CLOCK, TOOLS, WEATHER, deltas, style, summary

REQUIRED = ToolChoice("required")
TWO = [("call", "get_weather", '{"city": "Paris", "days": 3}'), ("call", "clock", "{}")]
_V3, _V3_CALL, _V3_END, _V3_ALL_END = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI, _KIMI_CALL, _KIMI_BEGIN = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.",
    "<|tool_call_argument_begin|>",
)
_SEP, _KIMI_END = "<｜tool▁sep｜>", "<|tool_call_end|>"
ARGUMENTS = '{"city": "Paris", "days": 3}'

EXAMPLES: dict[str, str] = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; '
    f'{{"name": "clock", "parameters": {{}}}}',
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
    f'{{"name": "clock", "arguments": {{}}}}]',
    "phi4_mini": f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "clock", "arguments": {}}]<|/tool_call|>',
    "command": f'<|START_ACTION|>[{{"tool_name": "get_weather", "parameters": {ARGUMENTS}}}, '
    f'{{"tool_name": "clock", "parameters": {{}}}}]'
    "<|END_ACTION|>",
    "mistral": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
    f'{{"name": "clock", "arguments": {{}}}}]',
    "mistral_v11": f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}[TOOL_CALLS]clock[CALL_ID]123456789[ARGS]{{}}",
    "mistral_v13": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]clock[ARGS]{{}}",
    "pythonic": '[get_weather(city="Paris", days=3), clock()]',
    "llama4_pythonic": '<|python_start|>[get_weather(city="Paris", days=3), clock()]<|python_end|>',
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris", days=3), clock()]<|tool_call_end|>',
    "olmo3": '<function_calls>\nget_weather(city="Paris", days=3)\nclock()\n</function_calls>',
    "deepseek_v3": f"{_V3}{_V3_CALL}function{_SEP}get_weather\n```json\n{ARGUMENTS}\n```{_V3_END}\n"
    f"{_V3_CALL}function{_SEP}clock\n```json\n{{}}\n```{_V3_END}{_V3_ALL_END}",
    "deepseek_v31": f"{_V3}{_V3_CALL}get_weather{_SEP}{ARGUMENTS}{_V3_END}{_V3_CALL}clock{_SEP}{{}}{_V3_END}{_V3_ALL_END}",
    "kimi_k2": f"{_KIMI}{_KIMI_CALL}get_weather:0{_KIMI_BEGIN}{ARGUMENTS}{_KIMI_END}{_KIMI_CALL}clock:1{_KIMI_BEGIN}{{}}{_KIMI_END}"
    "<|tool_calls_section_end|>",
    "qwen3_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
    "harmony": "<|channel|>commentary to=functions.get_weather "
    f"<|constrain|>json<|message|>{ARGUMENTS}",
}
"""Two tool calls in every format, except harmony, which allows one."""


class Bytes:
    """A tokenizer with one token per byte and further control tokens."""

    bos_token_id = None

    def __init__(self, control: Sequence[str]) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [
            text.encode() for text in (*control, "<eos>")
        ]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1
        self.control = {text: 256 + i for i, text in enumerate(control)}

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def encode(self, text: str) -> list[int]:
        """Encode control tokens' texts as these tokens."""
        ids: list[int] = []
        while text:
            control = next((item for item in self.control if text.startswith(item)), None)
            ids += [self.control[control]] if control else text[0].encode()
            text = text[len(control or text[0]) :]
        return ids


def control_tokens(format_: str) -> list[str]:
    return [*TOOL_CALL_FORMATS[format_].openers, *TOOL_CALL_FORMATS[format_].markers]


def verdict(grammar: str, text: str, control: Sequence[str] = ()) -> str:
    """Return `whole`, `begun` or `refused` for a text under a grammar."""
    tokenizer = Bytes(control)
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(tokenizer)), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text)
    if matcher.try_consume_tokens(ids) < len(ids):
        return "refused"
    return "whole" if matcher.is_accepting() else "begun"


def grammar_of(
    format_: str, choice: ToolChoice = REQUIRED, tools: Sequence[Tool] = TOOLS, **options: Any
) -> str:
    thinking = options.pop("thinking", None)
    grammar = tool_grammar(style(format_, thinking), tools, choice, **options)
    assert grammar is not None
    return grammar


class TestEveryFormat:
    @pytest.mark.parametrize("format_", TOOL_CALL_FORMATS)
    @pytest.mark.parametrize("with_control", [False, True])
    def test_grammar_accepts_the_format(self, format_: str, with_control: bool) -> None:
        control = control_tokens(format_) if with_control else []
        grammar = grammar_of(format_, control_tokens=Bytes(control).control)
        assert verdict(grammar, EXAMPLES[format_], control) == "whole"
        calls = summary(deltas(style(format_).parser(tools=TOOLS), [EXAMPLES[format_]]))
        assert calls == (TWO[:1] if format_ == "harmony" else TWO)

    @pytest.mark.parametrize("format_", TOOL_CALL_FORMATS)
    def test_a_demanded_call_is_never_content(self, format_: str) -> None:
        """The start of a call that the length cuts before its name is no text for the user."""
        demanded = ToolChoice("named", WEATHER.name).demanded(TOOLS)
        starts = 0
        for end in range(1, len(EXAMPLES[format_])):
            output_parser = style(format_).parser(tools=TOOLS, parallel=False, demanded=demanded)
            found = summary(deltas(output_parser, list(EXAMPLES[format_][:end])))
            assert all(item[:2] == ("call", WEATHER.name) for item in found)
            starts += len(found)
        assert starts > len(EXAMPLES[format_]) / 3

    @pytest.mark.parametrize("format_", sorted(TOOL_CALL_FORMATS.keys() - {"harmony"}))
    def test_a_repeated_call_ends_a_demanded_output(self, format_: str) -> None:
        demanded = REQUIRED.demanded(TOOLS)
        separator = "; " if format_ == "llama3_json" else "\n"
        thrice = separator.join([EXAMPLES[format_]] * 3)
        for chunks in ([thrice], list(thrice)):
            output_parser = style(format_).parser(tools=TOOLS, demanded=demanded)
            assert summary(deltas(output_parser, chunks)) == TWO
        if format_ != "pythonic":  # which has one list of calls
            assert output_parser.has_repeated
            assert summary(deltas(style(format_).parser(tools=TOOLS), [thrice]))[2:] != []

    @pytest.mark.parametrize(
        ("calls", "expected"),
        [
            (["f1", "f1"], ["f1"]),
            (["f1", "g1", "f1", "g2"], ["f1", "g1"]),
            (["f1", "f12", "f1"], ["f1", "f12"]),
            (["f12", "f1", "f12"], ["f12", "f1"]),
            (["f", "f"], ["f"]),
            (["f1", "f"], ["f1", "f"]),
        ],
    )
    def test_only_equal_calls_are_repeats(self, calls: list[str], expected: list[str]) -> None:
        def written(call: str) -> str:
            arguments = {"n": int(call[1:])} if call[1:] else {}
            body = json.dumps({"name": call[0], "arguments": arguments})
            return f"<tool_call>\n{body}\n</tool_call>"

        tools = [Tool("f"), Tool("g")]
        text = "\n".join(map(written, calls))
        output_parser = style("hermes").parser(tools=tools, demanded=["f", "g"])
        found = summary(deltas(output_parser, list(text)))
        assert [name + re.sub("[^0-9]", "", text) for _, name, text in found] == expected

    @pytest.mark.parametrize("format_", TOOL_CALL_FORMATS)
    def test_grammar_accepts_every_prefix(self, format_: str) -> None:
        assert verdict(grammar_of(format_), EXAMPLES[format_][:-1]) == "begun"

    @pytest.mark.parametrize("format_", TOOL_CALL_FORMATS)
    @pytest.mark.parametrize(
        "change", [("get_weather", "get_whether"), ("days", "dais"), ("3", "x")]
    )
    def test_grammar_refuses_other_text(self, format_: str, change: tuple[str, str]) -> None:
        assert (
            verdict(
                grammar_of(format_, tools=(closed(WEATHER), CLOCK)),
                EXAMPLES[format_].replace(*change),
            )
            == "refused"
        )

    @pytest.mark.parametrize("format_", TOOL_CALL_FORMATS)
    def test_grammar_refuses_content_before(self, format_: str) -> None:
        assert verdict(grammar_of(format_), "I ") == "refused"

    @pytest.mark.parametrize("format_", sorted(TOOL_CALL_FORMATS.keys() - {"harmony"}))
    def test_grammar_of_one_call(self, format_: str) -> None:
        assert verdict(grammar_of(format_, parallel=False), EXAMPLES[format_]) == "refused"

    @pytest.mark.parametrize("format_", sorted(TOOL_CALL_FORMATS.keys() - {"harmony"}))
    def test_grammar_bounds_the_number_of_calls(self, format_: str) -> None:
        """A small model would repeat one call until its tokens are used up."""
        assert f"{{0,{lark.MAX_CALLS - 1}}}" in grammar_of(format_)
        call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
        calls = [call] * lark.MAX_CALLS
        assert verdict(grammar_of("hermes"), "\n".join(calls)) == "whole"
        assert verdict(grammar_of("hermes"), "\n".join([*calls, call])) == "refused"

    @pytest.mark.parametrize("format_", TOOL_CALL_FORMATS)
    def test_grammar_of_a_named_tool(self, format_: str) -> None:
        grammar = grammar_of(format_, ToolChoice("named", "clock"))
        assert verdict(grammar, EXAMPLES[format_]) == "refused"
        assert "get_weather" not in grammar

    @pytest.mark.parametrize("format_", ["pythonic", "qwen3_xml", "glm45"])
    def test_grammar_of_optional_arguments(self, format_: str) -> None:
        schema = {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in "abc"},
            "required": ["b"],
        }
        grammar = grammar_of(format_, tools=[Tool("f", schema)])
        for names, result in (
            ("abc", "whole"),
            ("b", "whole"),
            ("ab", "whole"),
            ("bc", "whole"),
            ("ac", "refused"),
            ("", "refused"),
        ):
            assert verdict(grammar, written(format_, dict.fromkeys(names, 1))) == result

    @pytest.mark.parametrize("format_", ["pythonic", "qwen3_xml", "glm45"])
    def test_grammar_of_schemas_with_references(self, format_: str) -> None:
        text = written(format_, {"places": [{"lat": 1.5}]}, "get_weather")
        assert (
            verdict(
                grammar_of(
                    format_, tools=[Tool("get_weather", {**WEATHER.parameters, "required": []})]
                ),
                text,
            )
            == "whole"
        )

    @pytest.mark.parametrize("format_", ["qwen3_xml", "glm45"])
    def test_grammar_of_enumerations(self, format_: str) -> None:
        tools = [Tool("f", {"properties": {"units": {"enum": ["metric", "imperial"]}}})]
        assert (
            verdict(grammar_of(format_, tools=tools), written(format_, {"units": "metric"}))
            == "whole"
        )
        assert (
            verdict(grammar_of(format_, tools=tools), written(format_, {"units": "other"}))
            == "refused"
        )


class TestRandomText:
    SCHEMA: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "digit": {"type": "integer", "minimum": 0, "maximum": 9},
            "word": {"type": "string", "enum": ["a<b", 'x"y', "z\n"]},
            "flag": {"type": ["boolean", "null"]},
            "list": {"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2},
        },
        "required": ["word"],
        "additionalProperties": False,
    }

    def walk(self, grammar: str, rng: Random, begun: bytes) -> str:
        """Return a random complete text of a grammar that starts with `begun`."""
        matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes([]))), grammar)
        text = bytearray(begun)
        assert matcher.consume_tokens(list(begun))
        while not (matcher.is_accepting() and rng.random() < 0.5) and not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(256) if mask[i >> 3] >> (i & 7) & 1]
            solid = [i for i in allowed if chr(i) not in SPACE]
            text.append(rng.choice(solid if solid and rng.random() < 0.9 else allowed))
            assert matcher.consume_token(text[-1])
        return text.decode()

    @pytest.mark.parametrize("format_", TOOL_CALL_FORMATS)
    def test_random_text_of_a_grammar_is_valid_calls(self, format_: str) -> None:
        tools = [Tool("f", self.SCHEMA), CLOCK]
        grammar, rng = grammar_of(format_, tools=tools), Random(format_)
        begun = (
            b"<|channel|>commentary" if format_ == "harmony" else b""
        )  # random reasoning would never end
        for _ in range(6):
            text = self.walk(grammar, rng, begun)
            calls = summary(deltas(style(format_).parser(tools=tools), [text]))
            assert calls
            for kind, name, arguments in calls:
                assert (kind, name) in (("call", "f"), ("call", "clock")), text
                if name == "f":
                    self.check(json.loads(arguments))

    def check(self, arguments: dict[str, Any]) -> None:
        assert arguments.keys() <= self.SCHEMA["properties"].keys()
        assert arguments["word"] in self.SCHEMA["properties"]["word"]["enum"]
        assert arguments.get("digit", 0) in range(10)
        assert arguments.get("flag") in (True, False, None)
        assert all(item in ("a", 1) for item in arguments.get("list", []))


class TestHostileSchemas:
    @pytest.mark.parametrize("format_", TOOL_CALL_FORMATS)
    @pytest.mark.parametrize(
        "schema",
        [
            {"properties": 3},
            {"properties": {"a": 3}, "required": 3},
            {"properties": {"a": {"type": 3, "enum": 3}, "b": {"enum": []}}, "required": "ab"},
            {"properties": {"a": {"type": "string", "enum": "text"}}, "$defs": 3},
            {"properties": {'"\\\n)}<[1]>%json': {"type": "string", "const": '"\\\n\x00\u2028'}}},
        ],
    )
    def test_hostile_schema_is_compiled_or_refused(self, format_: str, schema: Any) -> None:
        """No text of a schema becomes part of the grammar."""
        grammar = grammar_of(format_, tools=[Tool("f", schema)])
        error = LLMatcher.validate_grammar(grammar)
        assert "Expected token" not in error and "lexer error" not in error, error


class TestReasoning:
    @pytest.mark.parametrize("control", [[], ["<think>", "</think>"]])
    def test_optional_reasoning(self, control: list[str]) -> None:
        grammar = grammar_of("hermes", thinking="think", control_tokens=Bytes(control).control)
        for text, result in (
            ("", "whole"),
            ("<think>\nHm < x.\n</think>\n\n", "whole"),
            ("Hm.</think>", "refused"),
        ):
            assert verdict(grammar, text + EXAMPLES["hermes"], control) == result

    @pytest.mark.parametrize("control", [[], ["<think>", "</think>"]])
    def test_started_reasoning_must_end(self, control: list[str]) -> None:
        grammar = grammar_of(
            "hermes", thinking="think", reasoning="begun", control_tokens=Bytes(control).control
        )
        for text, result in (("Hm.</think>", "whole"), ("", "begun")):
            assert verdict(grammar, text + EXAMPLES["hermes"], control) == result

    def test_ended_reasoning_does_not_begin_again(self) -> None:
        grammar = grammar_of("hermes", thinking="think", reasoning="closed")
        for text, result in (("<think>Hm.</think>", "refused"), ("", "whole")):
            assert verdict(grammar, text + EXAMPLES["hermes"]) == result

    @pytest.mark.parametrize("name", REASONING_FORMATS)
    def test_every_reasoning_format(self, name: str) -> None:
        thinking = REASONING_FORMATS[name]
        assert (
            verdict(
                grammar_of("hermes", thinking=name),
                f"{thinking.begin}Hm.{thinking.end}{EXAMPLES['hermes']}",
            )
            == "whole"
        )

    def test_reasoning_in_channels(self) -> None:
        reasoning = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        control = control_tokens("harmony")
        assert (
            verdict(
                grammar_of("harmony", control_tokens=Bytes(control).control),
                reasoning + EXAMPLES["harmony"],
                control,
            )
            == "whole"
        )


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_no_grammar_without_required_calls(choice: str) -> None:
    assert tool_grammar(style("hermes"), TOOLS, ToolChoice(choice)) is None


def test_no_grammar_without_a_format() -> None:
    assert tool_grammar(style(None), TOOLS, REQUIRED) is None


def closed(tool: Tool) -> Tool:
    return Tool(tool.name, {**tool.parameters, "additionalProperties": False})


def written(format_: str, arguments: Mapping[str, Any], name: str = "f") -> str:
    values = {
        key: str(value).replace("'", '"') if not isinstance(value, str) else value
        for key, value in arguments.items()
    }
    if format_ == "pythonic":
        return f"[{name}(" + ", ".join(f"{key}={value}" for key, value in values.items()) + ")]"
    if format_ == "glm45":
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in values.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"
