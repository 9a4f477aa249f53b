"""Sample outputs in every format, with the expected deltas."""

from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from headrace.server.output_parsers.deltas import (
    Content,
    Delta,
    ToolCallArguments,
    ToolCallStart,
    merge_deltas,
)
from headrace.server.output_parsers.formats import TOOL_CALL_FORMATS
from headrace.server.output_parsers.parser import OutputFormat, OutputParser
from headrace.server.output_parsers.reasoning_formats import REASONING_FORMATS
from headrace.server.output_parsers.tools import Tool

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": "string", "enum": ["metric", "imperial"]},
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        },
        "required": ["city"],
        "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
    },
)
CLOCK = Tool("clock")
TOOLS = (WEATHER, CLOCK)

Expected = list[tuple[str, ...]]
"""Tuples ("content", text), ("reasoning", text) and ("call", name, arguments)."""


class Sample(NamedTuple):
    format: str | None
    thinking: str | None
    text: str
    expected: Expected
    in_reasoning: bool = False


def style(format_: str | None, thinking: str | None = None) -> OutputFormat:
    """Make an output format whose tool calls have ids that count from 0."""
    numbers = count()
    found = (
        replace(TOOL_CALL_FORMATS[format_], new_id=lambda: str(next(numbers))) if format_ else None
    )
    return OutputFormat(found, REASONING_FORMATS[thinking] if thinking else None)


def parser(sample: Sample, **options: Any) -> OutputParser:
    tools = TOOLS if sample.format else ()
    return style(sample.format, sample.thinking).parser(
        in_reasoning=sample.in_reasoning, tools=tools, **options
    )


def deltas(parser: OutputParser, pieces: list[str]) -> list[Delta]:
    """Parse some chunks; returns the merged deltas."""
    found = [delta for piece in pieces for delta in parser.push(piece)]
    return merge_deltas(found + parser.finish())


def summary(found: list[Delta]) -> Expected:
    """Convert deltas to the form of `Expected`."""
    result: list[list[str]] = []
    calls: list[list[str]] = []
    for delta in found:
        if isinstance(delta, ToolCallStart):
            assert delta.index == len(calls)
            calls.append(["call", delta.name, ""])
            result.append(calls[-1])
        elif isinstance(delta, ToolCallArguments):
            assert delta.index == len(calls) - 1
            calls[-1][2] += delta.text
        else:
            result.append(["content" if isinstance(delta, Content) else "reasoning", delta.text])
    return [tuple(item) for item in result]


PARIS = ("call", "get_weather", '{"city": "Paris"}')
TIME = ("call", "clock", "{}")
_V3, _V3_CALL, _V3_END = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>function",
    "<｜tool▁call▁end｜>",
)
_KIMI, _KIMI_CALL, _KIMI_ARGUMENTS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
)

SAMPLES: list[Sample] = [
    # Hermes
    Sample(
        "hermes",
        None,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        [PARIS],
    ),
    Sample(
        "hermes",
        None,
        'Let me see.\n\n<tool_call>\n{"arguments": {"city": "Paris"}, "name": '
        '"get_weather"}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "id": 3, "arguments": {}}\n</tool_call>\n',
        [("content", "Let me see."), PARIS, TIME],
    ),
    Sample(
        "hermes",
        None,
        '<tool_call>{"name": "clock"}</tool_call> Done.\n',
        [TIME, ("content", "Done.\n")],
    ),
    Sample(
        "hermes",
        None,
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": '
        '"clock", "arguments": {}}]</tool_call>',
        [PARIS, TIME],
    ),
    Sample(
        "hermes",
        None,
        "A < b, <tool> and <tool_call",
        [("content", "A < b, <tool> and <tool_call")],
    ),
    # Calls without markers
    Sample(
        "hermes",
        None,
        '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```',
        [PARIS],
    ),
    Sample(
        "hermes",
        None,
        'I will look.\n\n```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```\nWait.',
        [("content", "I will look."), PARIS, ("content", "Wait.")],
    ),
    Sample(
        "hermes",
        None,
        '```\n[{"name": "clock", "parameters": {}}, {"name": "get_weather", "arguments": {"city": "Paris"}}]\n```',
        [TIME, PARIS],
    ),
    Sample(
        "hermes",
        None,
        '```tool_call\n{"name": "clock"}\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n',
        [TIME, PARIS],
    ),
    Sample("hermes", None, '{"name": "get_weather", "arguments": {"city": "Paris"}}\n', [PARIS]),
    Sample(
        "hermes",
        None,
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n\nWait.',
        [PARIS, ("content", "Wait.")],
    ),
    Sample(
        "hermes",
        None,
        'I will look.\n{"name": "clock"} {"name": "get_weather", "arguments": {"city": "Paris"}}',
        [("content", "I will look."), TIME, PARIS],
    ),
    Sample(
        "hermes",
        None,
        'The file:\n{"name": "x", "version": 1}\n{"name": "clock"}\nWait.',
        [("content", 'The file:\n{"name": "x", "version": 1}'), TIME, ("content", "Wait.")],
    ),
    Sample("hermes", None, '[{"name": "clock"}]', [TIME]),
    Sample("hermes", None, '[{"name": "x"}]', [("content", '[{"name": "x"}]')]),
    Sample(
        "hermes",
        None,
        'Now:\n<tools>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tools>',
        [("content", "Now:"), PARIS],
    ),
    Sample("hermes", None, "Use <tools>.", [("content", "Use <tools>.")]),
    Sample(
        "hermes", None, '{"id": "1", "type": "function", "name": "clock", "arguments": {}}', [TIME]
    ),
    Sample("hermes", None, "```python\nprint(1)\n```", [("content", "```python\nprint(1)\n```")]),
    Sample(
        "hermes",
        None,
        '```json\n{"name": "other", "arguments": {}}\n```',
        [("content", '```json\n{"name": "other", "arguments": {}}\n```')],
    ),
    Sample(
        "hermes",
        None,
        '```json\n{"name": "clock", "x": 1}\n```',
        [("content", '```json\n{"name": "clock", "x": 1}\n```')],
    ),
    Sample(
        "hermes",
        None,
        '```json\n{"name": "clock", "arguments": {"a": 1',
        [("content", '```json\n{"name": "clock", "arguments": {"a": 1')],
    ),
    Sample(
        "hermes",
        None,
        '```json\n{"name": "clock", "arguments": "a"}\n```',
        [("content", '```json\n{"name": "clock", "arguments": "a"}\n```')],
    ),
    Sample(
        "hermes",
        None,
        '{"name": "clock"} is a call.',
        [("content", '{"name": "clock"} is a call.')],
    ),
    Sample(
        "hermes",
        None,
        '```json\n{"name": "clock"} is a call.\n```',
        [("content", '```json\n{"name": "clock"} is a call.\n```')],
    ),
    Sample(
        "hermes",
        None,
        '<tool_call>{"name": "a", "arguments": {"x": "}\\"</tool_call>{", "y": [{"z": '
        "{}}]}}</tool_call>",
        [("call", "a", '{"x": "}\\"</tool_call>{", "y": [{"z": {}}]}')],
    ),
    # Llama 3
    Sample(
        "llama3_json", None, '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]
    ),
    Sample(
        "llama3_json",
        None,
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "clock"}',
        [PARIS, TIME],
    ),
    Sample(
        "llama3_json", None, '\n{"type": "function", "name": "clock", "parameters": {}}\n', [TIME]
    ),
    Sample(
        "llama3_json",
        None,
        '{"name": "Anna", "parameters": {}}',
        [("content", '{"name": "Anna", "parameters": {}}')],
    ),
    Sample(
        "llama3_json",
        None,
        'See {"name": "clock", "parameters": {}}',
        [("content", 'See {"name": "clock", "parameters": {}}')],
    ),
    # JSON lists
    Sample(
        "granite",
        None,
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        [PARIS],
    ),
    Sample(
        "phi4_mini",
        None,
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        [PARIS],
    ),
    Sample(
        "command",
        "command",
        "<|START_THINKING|>I will look.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "clock", "parameters": {}}\n]<|END_ACTION|>',
        [("reasoning", "I will look."), PARIS, TIME],
    ),
    Sample(
        "command",
        "command",
        "<|START_RESPONSE|>It is sunny.<|END_RESPONSE|>",
        [("content", "It is sunny.")],
    ),
    Sample(
        "command",
        "command",
        "<|START_THINKING|>Hm.<|END_THINKING|>\n<|START_RESPONSE|> Yes.<|END_RESPONSE|>",
        [("reasoning", "Hm."), ("content", "Yes.")],
    ),
    # Mistral
    Sample(
        "mistral",
        None,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": '
        '"abcdefghi"}, {"name": "clock", "arguments": {}}]',
        [PARIS, TIME],
    ),
    Sample(
        "mistral_v11",
        None,
        'Sure.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": '
        '"Paris"}[TOOL_CALLS]clock[CALL_ID]123456789[ARGS]{}',
        [("content", "Sure."), PARIS, TIME],
    ),
    Sample("mistral_v13", None, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', [PARIS]),
    Sample(
        "mistral_v13",
        None,
        '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]clock{}',
        [PARIS, TIME],
    ),
    Sample(
        "mistral",
        "mistral",
        "[THINK]So [THIN] it is.[/THINK]Yes.",
        [("reasoning", "So [THIN] it is."), ("content", "Yes.")],
    ),
    # Pythonic
    Sample("pythonic", None, '[get_weather(city="Paris"), clock()]', [PARIS, TIME]),
    Sample(
        "pythonic",
        None,
        "[link](https://example.com)",
        [("content", "[link](https://example.com)")],
    ),
    Sample("pythonic", None, "[unknown(a=1)]", [("content", "[unknown(a=1)]")]),
    Sample(
        "pythonic",
        None,
        "[get_weather(city='Pa\\'ris \"x\" \\u00e9\\n', days=-3, places=[{'lat': 1, "
        '"b": [True, None,],}, []], e={}, d=true)]',
        [
            (
                "call",
                "get_weather",
                '{"city": "Pa\'ris \\"x\\" \\u00e9\\n", "days": -3, "places": [{"lat": 1, '
                '"b": [true, null]}, []], "e": {}, "d": true}',
            )
        ],
    ),
    Sample(
        "pythonic",
        None,
        '[get_weather(city="""a"b""c""", days=0x1F, )]',
        [("call", "get_weather", '{"city": "a\\"b\\"\\"c", "days": 31}')],
    ),
    Sample(
        "llama4_pythonic",
        None,
        '<|python_start|>[get_weather(city="Paris")]<|python_end|>',
        [PARIS],
    ),
    Sample("llama4_pythonic", None, '[get_weather(city="Paris")]', [PARIS]),
    Sample(
        "lfm2",
        None,
        "So: <|tool_call_start|>[clock()]<|tool_call_end|>Wait.",
        [("content", "So:"), TIME, ("content", "Wait.")],
    ),
    Sample(
        "olmo3",
        None,
        '<function_calls>\nget_weather(city="Paris")\nclock()\n</function_calls>',
        [PARIS, TIME],
    ),
    # DeepSeek, Kimi
    Sample(
        "deepseek_v3",
        "think",
        f'Hm.</think>\n\nOk.{_V3}{_V3_CALL}<｜tool▁sep｜>get_weather\n```json\n{{"city": "Paris"}}\n```{_V3_END}\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("reasoning", "Hm."), ("content", "Ok."), PARIS, TIME],
        in_reasoning=True,
    ),
    Sample(
        "deepseek_v31",
        None,
        f'{_V3}<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{{"city": "Paris"}}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, TIME],
    ),
    Sample(
        "kimi_k2",
        None,
        _KIMI
        + f'{_KIMI_CALL}functions.get_weather:0{_KIMI_ARGUMENTS}{{"city": "Paris"}}<|tool_call_end|>'
        "<|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [PARIS, TIME],
    ),
    # Keys and values in tags
    Sample(
        "qwen3_xml",
        None,
        "I "
        'look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPa<b>\n"ris"\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        '<parameter=places>\n[{"lat": 1.5}]\n</parameter>\n<parameter=other>\nfree '
        "text\n</parameter>\n</function>\n</tool_call>",
        [
            ("content", "I look."),
            (
                "call",
                "get_weather",
                '{"city": "Pa<b>\\n\\"ris\\"\\n", "days": 3, "places": [{"lat": 1.5}], '
                '"other": "free text"}',
            ),
        ],
    ),
    Sample("qwen3_xml", None, "<function=clock></function>", [TIME]),
    Sample(
        "qwen3_xml",
        None,
        "<tool_call><function=f><parameter=a>True</parameter><parameter=b>1</parameter><parameter=c></parameter></function></tool_call>",
        [("call", "f", '{"a": true, "b": 1, "c": ""}')],
    ),
    Sample(
        "glm45",
        "think",
        "\n<think>Hm.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
        "\n<tool_call>clock</tool_call>",
        [("reasoning", "Hm."), PARIS, TIME],
    ),
    # Channels
    Sample(
        "harmony",
        None,
        "<|channel|>analysis<|message|>I "
        "look.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        [("reasoning", "I look."), ("content", "One moment."), PARIS],
    ),
    Sample(
        "harmony",
        None,
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
        "<|start|>assistant<|channel|>analysis to=functions.clock code<|message|><|call|>",
        [PARIS, TIME],
    ),
    Sample(
        "harmony",
        None,
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}<|return|>",
        [("reasoning", "One.\nTwo."), ("content", "{}")],
    ),
    Sample("harmony", None, "No channels < here.", [("content", "No channels < here.")]),
    # Reasoning
    Sample(
        None,
        "think",
        "<think>\nHm.\n\nSo.\n</think>\n\nYes. \n",
        [("reasoning", "Hm.\n\nSo."), ("content", "Yes. \n")],
    ),
    Sample(
        None,
        "think",
        " \nNo <think>reasoning</think>",
        [("content", " \nNo <think>reasoning</think>")],
    ),
    Sample(None, "think", "<think>never ends </thin", [("reasoning", "never ends </thin")]),
    Sample(
        None,
        "think",
        "<think>\n</think>\nYes.",
        [("reasoning", "Hm."), ("content", "Yes.")][1:],
        in_reasoning=True,
    ),
    Sample(
        "hermes",
        "think",
        '<think><tool_call>{"name": "clock"}</tool_call>',
        [("reasoning", '<tool_call>{"name": "clock"}</tool_call>')],
    ),
    Sample(
        None,
        "granite",
        "<think>Hm.</think>\n<response>Yes.</response>",
        [("reasoning", "Hm."), ("content", "Yes.")],
    ),
    Sample(
        None,
        "hunyuan",
        "<think>Hm.</think>\n<answer>\nYes.\n</answer>",
        [("reasoning", "Hm."), ("content", "Yes.\n")],
    ),
    Sample(
        None,
        "seed_oss",
        "<seed:think>Hm.</seed:think>Yes.",
        [("reasoning", "Hm."), ("content", "Yes.")],
    ),
    Sample(None, None, " All <think>of it</think>\n", [("content", " All <think>of it</think>\n")]),
]

MALFORMED: list[Sample] = [
    # before a call starts: all is content
    Sample(
        "hermes",
        None,
        "a <tool_call>\nhello</tool_call>",
        [("content", "a <tool_call>\nhello</tool_call>")],
    ),
    Sample("hermes", None, '<tool_call>{"name": "f"', [("content", '<tool_call>{"name": "f"')]),
    Sample(
        "hermes",
        None,
        '<tool_call>{"name": "f", "arguments": "x"}',
        [("content", '<tool_call>{"name": "f", "arguments": "x"}')],
    ),
    Sample(
        "hermes",
        None,
        '<tool_call>{"name": 3, "arguments": {}}',
        [("content", '<tool_call>{"name": 3, "arguments": {}}')],
    ),
    Sample(
        "hermes",
        None,
        '<tool_call>{"arguments": {"a": 1}}x',
        [("content", '<tool_call>{"arguments": {"a": 1}}x')],
    ),
    Sample(
        "hermes",
        None,
        '<tool_call>{"name": "", "arguments": {}}',
        [("content", '<tool_call>{"name": "", "arguments": {}}')],
    ),
    Sample(
        "hermes",
        None,
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        [("content", '<tool_call>{"name": "\\ud800", "arguments": {}}')],
    ),
    Sample(
        "hermes",
        None,
        '<tool_call><tool_call>{"name": "clock"}</tool_call>',
        [("content", "<tool_call>"), TIME],
    ),
    Sample("hermes", None, "<tool_call>", [("content", "<tool_call>")]),
    Sample(
        "mistral",
        None,
        "[TOOL_CALLS] nothing of [TOOL_CALLS]",
        [("content", "[TOOL_CALLS] nothing of [TOOL_CALLS]")],
    ),
    Sample("mistral_v13", None, "[TOOL_CALLS]f[ARGS]x", [("content", "[TOOL_CALLS]f[ARGS]x")]),
    Sample("deepseek_v31", None, f"{_V3}x", [("content", f"{_V3}x")]),
    Sample(
        "kimi_k2",
        None,
        "<|tool_calls_section_begin|>x",
        [("content", "<|tool_calls_section_begin|>x")],
    ),
    Sample(
        "qwen3_xml",
        None,
        "<tool_call>\n<function=f>\nx",
        [("content", "<tool_call>\n<function=f>\nx")],
    ),
    Sample(
        "glm45",
        None,
        '<tool_call>{"name": "f"}</tool_call>',
        [("content", '<tool_call>{"name": "f"}</tool_call>')],
    ),
    Sample("pythonic", None, "[get_weather(3)]", [("content", "[get_weather(3)]")]),
    Sample("llama3_json", None, '{"name": "clock", "x', [("content", '{"name": "clock", "x')]),
    Sample("harmony", None, "<|channel|>analysis<b>x", [("content", "<|channel|>analysis<b>x")]),
    Sample(
        "harmony",
        None,
        "<|channel|>x to=functions.f<|message|>no",
        [("content", "<|channel|>x to=functions.f<|message|>no")],
    ),
    Sample(
        "deepseek_v3",
        None,
        f"{_V3}{_V3_CALL}<｜tool▁sep｜>f\n```json\nx",
        [("content", f"{_V3}{_V3_CALL}<｜tool▁sep｜>f\n```json\nx")],
    ),
    Sample("pythonic", None, "[clock(=1)]", [("content", "[clock(=1)]")]),
    Sample("hermes", None, '<tool_call>{"na\\', [("content", '<tool_call>{"na\\')]),
    Sample("hermes", None, '<tool_call>{"na\\x": 1}', [("content", '<tool_call>{"na\\x": 1}')]),
    Sample(
        "hermes",
        None,
        '<tool_call>{"' + "\\n" * 600 + '": 1}',
        [("content", '<tool_call>{"' + "\\n" * 600 + '": 1}')],
    ),
    Sample(
        "hermes",
        None,
        '<tool_call>{"name": "' + "f" * 129 + '"}',
        [("content", '<tool_call>{"name": "' + "f" * 129 + '"}')],
    ),
    # after a call has started: its arguments end, and the rest is content
    Sample(
        "hermes",
        None,
        '<tool_call>{"name": "f", "arguments": {"a": [1}}',
        [("call", "f", '{"a": [1'), ("content", "}}")],
    ),
    Sample(
        "hermes",
        None,
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        [("call", "f", '{"a": "b')],
    ),
    Sample(
        "hermes",
        None,
        '<tool_call>{"name": "f", "arguments": {}, oops}',
        [("call", "f", "{}"), ("content", ", oops}")],
    ),
    Sample(
        "pythonic",
        None,
        "[get_weather(city=Paris)]",
        [("call", "get_weather", '{"city": '), ("content", "Paris)]")],
    ),
    Sample(
        "pythonic",
        None,
        '[clock(), get_weather(city="a" b)]',
        [TIME, ("call", "get_weather", '{"city": "a"'), ("content", "b)]")],
    ),
    Sample("qwen3_xml", None, "<function=f><parameter=n>12", [("call", "f", '{"n": 12')]),
    Sample(
        "qwen3_xml",
        None,
        "<function=get_weather><parameter=city>\nPa",
        [("call", "get_weather", '{"city": "Pa')],
    ),
    Sample(
        "pythonic",
        None,
        '[clock(a={"b": 1, 2: 3})]',
        [("call", "clock", '{"a": {"b": 1, '), ("content", "2: 3})]")],
    ),
    Sample(
        "pythonic",
        None,
        "[clock(a='x\\u12x4')]",
        [("call", "clock", '{"a": "x'), ("content", "\\u12x4')]")],
    ),
    Sample(
        "pythonic",
        None,
        "[clock(a=1_0e999)]",
        [("call", "clock", '{"a": '), ("content", "1_0e999)]")],
    ),
    Sample(
        "pythonic", None, "[clock(a=1.0.0)]", [("call", "clock", '{"a": '), ("content", "1.0.0)]")]
    ),
    Sample(
        "qwen3_xml",
        None,
        "<function=f><parameter=n>1</parameter>x",
        [("call", "f", '{"n": 1'), ("content", "x")],
    ),
    Sample(
        "glm45", None, "<tool_call>f<arg_key>a</arg_key><arg_value>[1", [("call", "f", '{"a": [1')]
    ),
    Sample(
        "glm45",
        None,
        "<tool_call>f<arg_key>a</arg_key><arg_value>[1</arg_value>x",
        [("call", "f", '{"a": "[1"'), ("content", "x")],
    ),
    Sample(
        "glm45",
        None,
        "<tool_call>f<arg_key>a</arg_key>b",
        [("call", "f", "{"), ("content", "a</arg_key>b")],
    ),
]
