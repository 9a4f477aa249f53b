"""A JSON list of tool calls after a marker: Granite 3, Phi 4 mini, Command R7B."""

from functools import partial

from headrace.server.output_parsers.formats.json_calls import list_grammar, read_list
from headrace.server.output_parsers.output_reader import OutputReader
from headrace.server.output_parsers.text_reader import Steps
from headrace.server.output_parsers.tool_call_format import ToolCallFormat


def _list_format(
    name: str,
    opener: str,
    closer: str,
    closes: bool,
    name_key: str = "name",
    arguments: str = "arguments",
) -> ToolCallFormat:
    def read(reader: OutputReader, opener: str) -> Steps[None]:
        yield from reader.space()
        yield from read_list(reader)
        yield from reader.space()
        yield from reader.closing(closer)

    grammar = partial(
        list_grammar,
        before=opener,
        after=closer if closes else "",
        name=name_key,
        arguments=arguments,
    )
    return ToolCallFormat(
        name=name, openers=(opener,), read=read, grammar=grammar, markers=(closer,)
    )


GRANITE = _list_format("granite", "<|tool_call|>", "<|/tool_call|>", closes=False)
PHI4_MINI = _list_format("phi4_mini", "<|tool_call|>", "<|/tool_call|>", closes=True)
COMMAND = _list_format(
    "command",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    closes=True,
    name_key="tool_name",
    arguments="parameters",
)
