"""The output parser in every format: its deltas, any chunks, and latency."""

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.server.output_parsers.deltas import (
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from headrace.server.output_parsers.formats import TOOL_CALL_FORMATS
from headrace.server.output_parsers.parser import OutputParser
from headrace.server.output_parsers.reasoning_formats import REASONING_FORMATS
from tests.server.output_parsers.samples import (
    MALFORMED,
    SAMPLES,
    TOOLS,
    Sample,
    deltas,
    parser,
    style,
    summary,
)

ALL = SAMPLES + MALFORMED

FRAGMENTS = sorted(
    {text for item in TOOL_CALL_FORMATS.values() for text in (*item.openers, *item.markers)}
    | {text for thinking in REASONING_FORMATS.values() for text in thinking.markers}
    | set(
        '{ } [ ] ( ) " \' \\ , : = ; < > \n x 1 clock functions. to= "name" "arguments" ```json'.split(
            " "
        )
    )
    | {
        '{"name": "clock"',
        '"arguments": {"a": ',
        "get_weather(city=",
        "True",
        '"""',
        "\\u00e9",
        " ",
    }
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def cut(text: str, at: list[int]) -> list[str]:
    places = [0, *sorted(at), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


class TestSamples:
    @pytest.mark.parametrize("sample", ALL)
    def test_sample(self, sample: Sample) -> None:
        assert summary(deltas(parser(sample), [sample.text])) == sample.expected

    @pytest.mark.parametrize("sample", ALL)
    def test_sample_in_two_chunks(self, sample: Sample) -> None:
        whole = deltas(parser(sample), [sample.text])
        assert deltas(parser(sample), list(sample.text)) == whole
        for at in range(len(sample.text)):
            assert deltas(parser(sample), [sample.text[:at], "", sample.text[at:]]) == whole

    @pytest.mark.parametrize("sample", SAMPLES)
    def test_sample_arguments_are_json(self, sample: Sample) -> None:
        for kind, *rest in sample.expected:
            assert kind != "call" or isinstance(json.loads(rest[1]), dict)

    @pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
    def test_every_tool_call_format_has_a_sample(self, name: str) -> None:
        assert [
            sample
            for sample in SAMPLES
            if sample.format == name and any(kind == "call" for kind, *_ in sample.expected)
        ]

    def test_tool_call_ids(self) -> None:
        def ids(format_: str, text: str) -> list[str]:
            output_parser = OutputParser(TOOL_CALL_FORMATS[format_], tools=TOOLS)
            return [
                delta.id
                for delta in output_parser.push(text) + output_parser.finish()
                if isinstance(delta, ToolCallStart)
            ]

        assert ids("mistral_v11", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}") == ["abcdefghi"]
        kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}"
        assert ids("kimi_k2", kimi) == ["functions.f:7"]
        new = ids("mistral", '[TOOL_CALLS][{"name": "f"}, {"name": "f"}]')
        assert len(set(new)) == 2 and all(len(item) == 9 and item.isalnum() for item in new)
        assert [item[:5] for item in ids("hermes", '<tool_call>{"name": "f"}')] == ["call_"]


class TestAnyText:
    @settings(max_examples=25, deadline=None)
    @given(st.data())
    @pytest.mark.parametrize("format_", [None, *TOOL_CALL_FORMATS])
    def test_chunks_do_not_matter(self, format_: str | None, data: st.DataObject) -> None:
        own = (
            [*TOOL_CALL_FORMATS[format_].openers, *TOOL_CALL_FORMATS[format_].markers]
            if format_
            else []
        )
        pieces = data.draw(
            st.lists(st.sampled_from(own + FRAGMENTS) | st.text(max_size=3), max_size=25)
        )
        text = "".join(pieces)
        thinking = data.draw(st.sampled_from([None, *REASONING_FORMATS]))
        sample = Sample(format_, thinking, text, [], data.draw(st.booleans()))
        ends = data.draw(st.sampled_from([(), ("<|call|>",), ("</s>", "<|im_end|>")]))
        at = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
        whole = deltas(parser(sample, end_tokens=ends), [text])
        assert deltas(parser(sample, end_tokens=ends), cut(text, at)) == whole
        assert deltas(parser(sample, end_tokens=ends), list(text)) == whole

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(
            st.sampled_from(
                [
                    "<tool_call>",
                    "</tool_call>",
                    '{"name": "f"',
                    ', "arguments": ',
                    "{",
                    "}",
                    "x",
                    '"',
                    " ",
                ]
            ),
            max_size=12,
        )
    )
    def test_no_text_is_lost(self, pieces: list[str]) -> None:
        """Only white space, markers and the frame of tool calls are dropped."""
        text = "".join(pieces)
        found = summary(deltas(parser(Sample("hermes", None, "", [])), [text]))
        if not any(kind == "call" for kind, *_ in found):
            assert "".join(rest[0] for _, *rest in found) == text
        rest = text
        for _, *parts in found:
            for part in parts:
                assert part in rest or part == "{}"
                rest = rest.partition(part)[2] if part in rest else rest

    @settings(max_examples=50, deadline=None)
    @given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
    def test_arguments_are_unchanged(self, arguments: dict[str, Any]) -> None:
        for text in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=1)):
            call = '<tool_call>{"name": "f", "arguments": ' + text + "}</tool_call>"
            assert summary(deltas(parser(Sample("hermes", None, "", [])), list(call))) == [
                ("call", "f", text)
            ]

    @settings(max_examples=50, deadline=None)
    @given(st.dictionaries(st.from_regex("[a-z_]{1,5}", fullmatch=True), VALUES, max_size=4))
    def test_python_literals_become_json(self, arguments: dict[str, Any]) -> None:
        call = "[clock(" + ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")]"
        [(kind, name, text)] = summary(deltas(parser(Sample("pythonic", None, "", [])), [call]))
        assert (kind, name, json.loads(text)) == ("call", "clock", arguments)


class TestLatency:
    def steps(self, sample: Sample, pieces: list[str]) -> list[list[Delta]]:
        output_parser = parser(sample)
        return [output_parser.push(piece) for piece in pieces]

    def test_content_waits_only_for_markers(self) -> None:
        found = self.steps(
            Sample("hermes", None, "", []), ["a", "<", "b", "<tool", "_cal", "x", " ", "y"]
        )
        texts = [
            "".join(delta.text for delta in step if isinstance(delta, Content)) for step in found
        ]
        assert texts == ["a", "", "<b", "", "", "<tool_calx", "", " y"]

    @given(
        st.lists(
            st.sampled_from(["<", "<tool", "_call", "<tool_cal", " ", "\n", "x", "<t <"]),
            max_size=12,
        )
    )
    def test_only_a_partial_marker_waits(self, pieces: list[str]) -> None:
        """The held text is white space and the beginning of a marker at the end of the text."""
        output_parser, text, given_ = parser(Sample("hermes", None, "", [])), "", ""
        for piece in pieces:
            text += piece
            given_ += "".join(
                delta.text for delta in output_parser.push(piece) if isinstance(delta, Content)
            )
            longest = max(n for n in range(11) if text.endswith("<tool_call>"[:n]))
            assert given_ == text[: len(text) - longest].rstrip()

    def test_content_without_tools_does_not_wait(self) -> None:
        assert self.steps(Sample(None, None, "", []), ["<tool_call> "]) == [
            [Content("<tool_call> ")]
        ]

    def test_reasoning_waits_only_for_its_end_marker(self) -> None:
        found = self.steps(
            Sample(None, "think", "", []),
            ["<thi", "nk>", "a", "</", "b", "</think", ">", "c<think>"],
        )
        assert found == [
            [],
            [],
            [Reasoning("a")],
            [],
            [Reasoning("</b")],
            [],
            [],
            [Content("c<think>")],
        ]

    def test_arguments_do_not_wait(self) -> None:
        found = self.steps(
            Sample("hermes", None, "", []),
            ['<tool_call>{"name": "f", "arguments":', ' {"', "a", '"', ": 1", "}", "}"],
        )
        assert found[:2] == [[], [ToolCallStart(0, "0", "f"), ToolCallArguments(0, '{"')]]
        assert [
            [delta.text for delta in step if isinstance(delta, ToolCallArguments)]
            for step in found[2:]
        ] == [
            ["a"],
            ['"'],
            [": 1"],
            ["}"],
            [],
        ]

    def test_arguments_wait_for_the_name(self) -> None:
        found = self.steps(
            Sample("hermes", None, "", []),
            ['<tool_call>{"arguments": {"a": 1}, "name": "f', '"', "}"],
        )
        assert found == [[], [ToolCallStart(0, "0", "f"), ToolCallArguments(0, '{"a": 1}')], []]

    @pytest.mark.parametrize(
        ("format_", "before"),
        [
            ("pythonic", '[get_weather(city="'),
            ("qwen3_xml", "<function=get_weather><parameter=city>"),
        ],
    )
    def test_strings_in_arguments_do_not_wait(self, format_: str, before: str) -> None:
        found = self.steps(
            Sample(format_, None, "", []),
            [before, "Pa", "r", '\\"' if format_ == "pythonic" else '"', "is"],
        )
        assert [
            "".join(delta.text for delta in step if isinstance(delta, ToolCallArguments))
            for step in found[1:]
        ] == ["Pa", "r", '\\"', "is"]


class TestEndTokens:
    @pytest.mark.parametrize(
        ("text", "left"),
        [
            ("a<|im_end|>", "a"),
            ("a<|im_end|>b", "a<|im_end|>b"),
            ("a<|im_end", "a<|im_end"),
            ("<|im_end|><|im_end|>", "<|im_end|>"),
            ("</s>", ""),
        ],
    )
    def test_only_the_last_end_token_is_removed(self, text: str, left: str) -> None:
        for pieces in ([text], list(text)):
            found = deltas(OutputParser(None, end_tokens=("<|im_end|>", "</s>")), pieces)
            assert "".join(delta.text for delta in found if isinstance(delta, Content)) == left

    def test_end_token_after_a_tool_call(self) -> None:
        output_parser = OutputParser(
            TOOL_CALL_FORMATS["llama3_json"], tools=TOOLS, end_tokens=("<|eom_id|>",)
        )
        assert summary(deltas(output_parser, ['{"name": "clock"}<|eom_id|>'])) == [
            ("call", "clock", "{}")
        ]

    def test_end_tokens_that_contain_each_other(self) -> None:
        for text in ("x<a>", "xx<a>y", "x<a>y"):
            ends = ("<a>", "x<a>y")
            left = [
                deltas(OutputParser(None, end_tokens=ends), pieces)
                for pieces in ([text], list(text))
            ]
            assert left[0] == left[1] == ([Content("x")] if text != "x<a>y" else [])


class TestMarkers:
    @pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
    def test_no_marker_contains_another(self, name: str) -> None:
        """Otherwise the result would depend on the chunks."""
        texts = (*TOOL_CALL_FORMATS[name].openers, *TOOL_CALL_FORMATS[name].markers)
        assert len(set(texts)) == len(texts)
        assert not [
            (a, b) for a in texts for b in texts if a != b and a in b and a != "<|tool_call|>"
        ]

    @pytest.mark.parametrize("name", REASONING_FORMATS)
    def test_no_reasoning_marker_contains_another(self, name: str) -> None:
        texts = REASONING_FORMATS[name].markers
        assert not [(a, b) for a in texts for b in texts if a != b and a in b]


def hostile(size: int) -> dict[str, tuple[Sample, str]]:
    """Return texts of about `size` characters that are quadratic for a careless parser."""

    def many(piece: str) -> str:
        return piece * (size // len(piece))

    def of(format_: str | None, text: str, thinking: str | None = None) -> tuple[Sample, str]:
        return Sample(format_, thinking, "", []), text

    begun = '<tool_call>{"name": "f", "arguments": '
    return {
        "angles": of("hermes", many("<")),
        "beginnings": of("hermes", many("<tool_cal")),
        "openers": of("hermes", many("<tool_call>")),
        "openers and braces": of("hermes", many('<tool_call>{"')),
        "unclosed calls": of("hermes", many('<tool_call>{"name": "f')),
        "spaces": of("hermes", many(" \n")),
        "nested": of("hermes", begun + many('{"a":[')),
        "unclosed string": of("hermes", begun + '{"a": "' + many("x")),
        "backslashes": of("hermes", begun + '{"a": "' + many("\\")),
        "arguments before the name": of("hermes", '<tool_call>{"arguments": {"a": "' + many("x")),
        "long name": of("hermes", '<tool_call>{"name": "' + many("x")),
        "digits": of("hermes", begun + '{"a": ' + many("1")),
        "many calls": of("hermes", many('<tool_call>{"name": "f"}</tool_call>')),
        "braces": of("llama3_json", many("{")),
        "lists": of("pythonic", "[clock(a=" + many("[")),
        "quotes": of("pythonic", '[clock(a="""' + many('"x')),
        "literals": of("pythonic", "[clock(a=[" + many("1, ")),
        "parameters": of("qwen3_xml", "<function=f>" + many("<parameter=a>1</parameter>")),
        "endless value": of("qwen3_xml", "<function=f><parameter=a>" + many("</paramete")),
        "values": of(
            "glm45", "<tool_call>f" + many("<arg_key>a</arg_key><arg_value>[</arg_value>")
        ),
        "channels": of("harmony", many("<|channel|>a")),
        "messages": of("harmony", many("<|start|>assistant<|channel|>analysis<|message|>x<|end|>")),
        "ids": of("mistral_v13", many("[TOOL_CALLS]f[ARGS]")),
        "begins": of("deepseek_v31", many("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>")),
        "thoughts": of(None, "<think>" + many("</think"), "think"),
    }


def lines_run(action: Callable[[], object]) -> int:
    """Count the lines of Headrace's Python code that an action runs."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if "headrace" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return lines


class TestLinearTime:
    @pytest.mark.parametrize("name", hostile(1))
    @pytest.mark.parametrize("piece", [7, None])
    def test_parser_takes_linear_time(self, name: str, piece: int | None) -> None:
        """Both halves of a text run about as many lines, and only a partial marker is held."""
        work, largest = [], 0
        for size in (1_000, 2_000, 4_000):
            sample, text = hostile(size)[name]
            output_parser = parser(sample)

            def read(output_parser: OutputParser = output_parser, text: str = text) -> None:
                nonlocal largest
                for at in range(0, len(text), piece or len(text)):
                    output_parser.push(text[at : at + (piece or len(text))])
                    largest = max(
                        largest, *(stage._reader.num_unread for stage in output_parser._stages)
                    )
                output_parser.finish()

            work.append(lines_run(read))
        assert work[2] - work[1] <= 2.1 * (work[1] - work[0]) + 200
        assert largest < 64

    @pytest.mark.parametrize("name", ["openers and braces", "nested", "spaces"])
    def test_parser_reads_a_megabyte(self, name: str) -> None:
        sample, text = hostile(1 << 20)[name]
        output_parser = parser(sample)
        found = deltas(output_parser, [text[at : at + 64] for at in range(0, len(text), 64)])
        assert (
            sum(len(delta.text) for delta in found if not isinstance(delta, ToolCallStart))
            > 1 << 19
        )


def test_no_tool_calls_without_tools() -> None:
    text = '<tool_call>{"name": "clock"}</tool_call>'
    assert summary(deltas(style("hermes").parser(), [text])) == [("content", text)]
