"""The tools and the `tool_choice` of a request."""

from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.server.output_parsers.tools import Tool, ToolChoice, read_tool_choice, read_tools

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


class TestTools:
    def test_read_tools(self) -> None:
        tools = read_tools(
            [
                function(name="f", parameters=SCHEMA, description="x", strict=True),
                function(name="g.h-1", parameters=None),
            ]
        )
        assert tools == (
            Tool("f", SCHEMA, strict=True, field="tools[0]"),
            Tool("g.h-1", field="tools[1]"),
        )
        assert tools[1].parameters["additionalProperties"] is False

    @pytest.mark.parametrize("tools", [None, []])
    def test_no_tools(self, tools: Any) -> None:
        assert read_tools(tools) == ()

    @pytest.mark.parametrize(
        ("tool", "message"),
        [
            ({}, r"tools\[1\] must be"),
            ({"type": "custom", "function": {"name": "f"}}, r"tools\[1\] must be"),
            ({"type": "function", "function": "f"}, r"tools\[1\] must be"),
            (function(), r"tools\[1\].function.name must have"),
            (function(name=3), r"tools\[1\].function.name must have"),
            (function(name="a b"), r"tools\[1\].function.name must have"),
            (function(name='a"'), r"tools\[1\].function.name must have"),
            (function(name="a" * 129), r"tools\[1\].function.name must have"),
            (function(name="a\n"), r"tools\[1\].function.name must have"),
            (function(name="first"), r"tools\[1\].function.name .first. is already used"),
            (
                function(name="f", parameters=[]),
                r"tools\[1\].function.parameters must be a JSON schema",
            ),
            (
                function(name="f", parameters="{}"),
                r"tools\[1\].function.parameters must be a JSON schema",
            ),
        ],
    )
    def test_invalid_tools_are_named(self, tool: Any, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            read_tools([function(name="first"), tool])

    @pytest.mark.parametrize(
        ("schema", "types"),
        [
            ({"type": "string"}, {"string"}),
            ({"type": ["string", "null"]}, {"string", "null"}),
            ({"enum": ["a", "b"]}, {"string"}),
            ({"enum": ["a", 1]}, set()),
            ({"type": 3}, set()),
            ({}, set()),
            (3, set()),
        ],
    )
    def test_parameter_types(self, schema: Any, types: set[str]) -> None:
        assert Tool("f", {"properties": {"a": schema}}).parameter_types("a") == types

    def test_types_of_an_unknown_parameter(self) -> None:
        assert (
            Tool("f", {"properties": 3}).parameter_types("a")
            == Tool("f").parameter_types("a")
            == frozenset()
        )


class TestToolChoice:
    TOOLS = (Tool("f"), Tool("g"))

    @pytest.mark.parametrize("mode", ["none", "auto", "required"])
    def test_tool_choice_by_mode(self, mode: str) -> None:
        assert read_tool_choice(mode, self.TOOLS) == ToolChoice(mode)

    def test_tool_choice_by_name(self) -> None:
        assert read_tool_choice(function(name="g"), self.TOOLS) == ToolChoice("named", "g")

    def test_default_tool_choice(self) -> None:
        assert read_tool_choice(None, self.TOOLS) == ToolChoice("auto")
        assert read_tool_choice(None, ()) == ToolChoice("none")
        assert read_tool_choice("auto", ()) == ToolChoice("none")

    @pytest.mark.parametrize(
        "choice",
        [
            "any",
            "",
            function(name="h"),
            function(),
            {"type": "function"},
            {"function": "f"},
            {"name": "f"},
        ],
    )
    def test_invalid_tool_choice(self, choice: Any) -> None:
        with pytest.raises(RequestError, match="tool_choice"):
            read_tool_choice(choice, self.TOOLS)

    def test_required_needs_tools(self) -> None:
        with pytest.raises(RequestError, match="has no tools"):
            read_tool_choice("required", ())
