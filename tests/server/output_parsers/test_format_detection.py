"""Detection of the tool-call and reasoning formats of a chat template."""

from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.server.output_parsers.formats import TOOL_CALL_FORMATS
from headrace.server.output_parsers.parser import OutputFormat
from headrace.server.output_parsers.reasoning_formats import REASONING_FORMATS
from tests.chat_templates import KINDS
from tests.server.output_parsers.samples import TOOLS

HERMES = """{%- if tools %}{{- '<|im_start|>system\\nCall functions so:\\n<tool_call>\\n{\\"name\\": ...}\\n</tool_call>' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"""
LLAMA3 = """{%- for m in messages %}{%- if 'tool_calls' in m %}{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content }}{%- endif %}{%- endfor %}"""
TEMPLATES: dict[str, tuple[str, str | None, str | None]] = {
    "plain": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' "
        "}}{% endfor %}",
        None,
        None,
    ),
    "alternating": (KINDS["ALTERNATING"], None, None),
    "turns": (KINDS["TURNS"], None, None),
    "grounded": (KINDS["GROUNDED"], None, None),
    "a tool at a time": (KINDS["HEADERS_WITH_A_DATE"], None, None),
    "Qwen 2.5": (HERMES, "hermes", None),
    "Qwen 3": (KINDS["TOOLS_OF_HERMES"], "hermes", "think"),
    "Qwen3-Coder": (
        HERMES + "<function=example>\\n<parameter=key>\\nvalue\\n</parameter>",
        "qwen3_xml",
        None,
    ),
    "GLM 4.5": (
        "[gMASK]<sop><tool_call>{name}\\n<arg_key>{key}</arg_key>{{ '<think></think>' }}",
        "glm45",
        "think",
    ),
    "Llama 3": (LLAMA3, "llama3_json", None),
    "Llama 4": (LLAMA3 + "{{- '<|python_start|>' }}", "llama4_pythonic", None),
    "OLMo 3": (
        "<functions></functions>, write calls within <function_calls></function_calls>",
        "olmo3",
        None,
    ),
    "LFM 2": (
        "List of tools: <|tool_list_start|>, {{ '<|tool_call_start|>' + call }}",
        "lfm2",
        None,
    ),
    "pythonic": (
        "use the format [func_name1(params_name1=params_value1...), func_name2(params)]",
        "pythonic",
        None,
    ),
    "Mistral 7B": ("{{ '[TOOL_CALLS] [' }}{{ '{\"name\": \"' + call.name }}", "mistral", None),
    "Mistral Small 3.2": (
        "{{ '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments }}",
        "mistral_v11",
        None,
    ),
    "Magistral": (
        "{{ '[THINK]' + block.thinking + '[/THINK]' }}{{ '[TOOL_CALLS]' + name + '[ARGS]' "
        "+ arguments }}",
        "mistral_v13",
        "mistral",
    ),
    "DeepSeek R1": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + "
        "'\\n' + '```json' + '\\n'}}"
        "{{'<｜Assistant｜><think>\\n'}}"
        "{% set content = content.split('</think>')[-1] %}",
        "deepseek_v3",
        "think",
    ),
    "DeepSeek V3.1": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}{{'</think>'}}",
        "deepseek_v31",
        "think",
    ),
    "Kimi K2": (
        "<|tool_calls_section_begin|>{{ '<|tool_call_begin|>' + id + "
        "'<|tool_call_argument_begin|>' }}",
        "kimi_k2",
        None,
    ),
    "Granite 3.3": (
        "respond with <|tool_call|> followed by a JSON list. Write your thoughts between "
        "<think></think> and the answer between "
        "<response></response>",
        "granite",
        "granite",
    ),
    "Phi 4 mini": ("{{ '<|tool_call|>[' + calls + ']<|/tool_call|>' }}", "phi4_mini", None),
    "Command R7B": (
        "Start by writing <|START_THINKING|>, close it with <|END_THINKING|>; Action: "
        "write <|START_ACTION|>; "
        "<|START_RESPONSE|><|END_RESPONSE|>",
        "command",
        "command",
    ),
    "Seed-OSS": ("{{ '<seed:think>' + thought + '</seed:think>' }}", None, "seed_oss"),
    "Hunyuan": (
        "{{ '<think>\\n' + thought + '\\n</think>\\n<answer>\\n' + content + '\\n</answer>' }}",
        None,
        "hunyuan",
    ),
    "gpt-oss": (
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}",
        "harmony",
        None,
    ),
}


class TestDetection:
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_formats_by_chat_template(self, name: str) -> None:
        template, tool_format, thinking = TEMPLATES[name]
        style = OutputFormat.of(template)
        assert style.tool_call_format
        assert style.is_generic == (tool_format is None)
        assert style.tool_call_format.name == (tool_format or "hermes")
        assert (style.reasoning_format and style.reasoning_format.name) == thinking

    def test_only_an_unnamed_format_is_generic(self) -> None:
        assert OutputFormat.of("", "hermes").is_generic
        assert not OutputFormat.of("", "llama3_json").is_generic
        assert not OutputFormat.of(HERMES, "hermes").is_generic
        assert not OutputFormat.of("", "none").is_generic

    def test_every_format_is_detected(self) -> None:
        formats, thoughts = zip(
            *((tool_format, thinking) for _, tool_format, thinking in TEMPLATES.values()),
            strict=True,
        )
        assert set(formats) - {None} == TOOL_CALL_FORMATS.keys()
        assert set(thoughts) - {None} == REASONING_FORMATS.keys()

    def test_names_override_detection(self) -> None:
        assert OutputFormat.of(HERMES, "glm45", "seed_oss") == OutputFormat(
            TOOL_CALL_FORMATS["glm45"], REASONING_FORMATS["seed_oss"]
        )
        assert OutputFormat.of(KINDS["TOOLS_OF_HERMES"], "none", "none") == OutputFormat()

    def test_unknown_format_names_are_refused(self) -> None:
        with pytest.raises(
            RequestError,
            match=r"tool_call_parser 'x' is unknown; use command, deepseek_v3,",
        ):
            OutputFormat.of("", "x")
        with pytest.raises(
            RequestError, match=r"reasoning_parser 'x' is unknown; use command, granite"
        ):
            OutputFormat.of("", None, "x")


class TestSpecialTokens:
    def test_special_tokens_if_a_marker_is_one(self) -> None:
        style = OutputFormat.of(KINDS["TOOLS_OF_HERMES"])
        assert not style.needs_special_tokens({"<|im_end|>"}, with_tools=True)
        assert style.needs_special_tokens({"<|im_end|>", "<tool_call>"}, with_tools=True)
        assert not style.needs_special_tokens({"<|im_end|>", "<tool_call>"}, with_tools=False)
        assert style.needs_special_tokens({"</think>"}, with_tools=False)

    def test_special_tokens_for_channels_without_tools(self) -> None:
        assert OutputFormat(TOOL_CALL_FORMATS["harmony"]).needs_special_tokens(
            {"<|channel|>"}, with_tools=False
        )

    def test_no_special_tokens_without_formats(self) -> None:
        assert not OutputFormat().needs_special_tokens({"<|im_end|>"}, with_tools=True)


@pytest.mark.parametrize(
    ("prompt", "options", "state"),
    [
        ("assistant\n<think>\n", {}, "begun"),
        ("<think>", {"may_reason": False}, "begun"),
        ("<think>\n\n</think>\n\n", {}, "closed"),
        ("Is <think> a word?", {}, "possible"),
        ("", {}, "possible"),
        ("", {"may_reason": False}, "closed"),
        ("<think>Hm", {"continued": "<think>Hm"}, "begun"),
        ("<think>Hm</think>{", {"continued": "<think>Hm</think>{"}, "possible"),
    ],
)
def test_reasoning_at_the_end_of_a_prompt(prompt: str, options: dict[str, Any], state: str) -> None:
    output_format = OutputFormat(None, REASONING_FORMATS["think"])
    assert output_format.reasoning_state(prompt, **options) == state
    assert OutputFormat().reasoning_state(prompt) == "possible"


def test_channels_without_tools_have_no_tool_calls() -> None:
    output_parser = OutputFormat(TOOL_CALL_FORMATS["harmony"]).parser()
    text = '<|channel|>commentary to=functions.clock<|message|>{"a": 1}<|call|>'
    assert [delta.text for delta in output_parser.push(text) + output_parser.finish()] == [
        '{"a": 1}'
    ]
    assert len(OutputFormat(TOOL_CALL_FORMATS["harmony"]).parser(tools=TOOLS).push(text)) == 2
