"""The jinja2 environments of chat templates: one as transformers makes it, and one that traces.

The tracing environment gives the same text, as a `TracedText`.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from jinja2 import Template, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import do_indent, do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context

from headrace.checkpoint.template_text import INSERTED, LITERAL, TracedText, concat


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of Hugging Face transformers."""

    def __init__(self, names: dict[str, Any]) -> None:
        """`names` are further global functions."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        # Chat templates do not expect jinja2's other globals.
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals.update(names)
        self.filters["tojson"] = _tojson
        self._messages: dict[int, int] = {}
        self.last_read: tuple[int, str] | None = None
        """Number of the message that the template read last, and the field."""

    def watch(self, messages: Sequence[Any]) -> None:
        """Note from now on which of the messages the template reads."""
        self._messages = {id(message): i for i, message in enumerate(messages)}
        self.last_read = None

    def getattr(self, obj: Any, attribute: str) -> Any:
        if (number := self._messages.get(id(obj))) is not None:
            self.last_read = number, attribute
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if (number := self._messages.get(id(obj))) is not None:
            self.last_read = number, str(argument)
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Access to hidden attributes is an error, not an empty string."""
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__!r} is not allowed")


class _GenerationBlock(Extension):
    """`{% generation %}` marks text for training; its body has a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _TracingGenerator(CodeGenerator):
    """Makes traced text of the literals of a template, and of all that it prints."""

    def _literal(self, text: str) -> str:
        literals = self.environment.literals  # type: ignore[attr-defined]
        literals.append(TracedText(text, LITERAL))
        return f"environment.literals[{len(literals) - 1}]"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(self._literal(value))
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_text((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.text(")


class TracingSandbox(Sandbox):
    code_generator_class = _TracingGenerator
    concat = staticmethod(concat)

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(names)
        # Folded lists of constants would be lists of plain text.
        self.optimized = False
        self.literals: list[TracedText] = []
        self.filters |= {"tojson": _traced_tojson, "join": _traced_join, "indent": _traced_indent}

    @staticmethod
    def text(value: Any) -> TracedText:
        """Trace a printed value."""
        if isinstance(value, TracedText):
            return value
        is_plain = value is None or isinstance(value, int | float | Undefined)
        return TracedText(str(value), LITERAL) if is_plain else TracedText(str(value))

    @staticmethod
    def join_text(values: Iterable[Any]) -> TracedText:
        return concat(map(TracingSandbox.text, values))


def _traced_tojson(value: Any, *args: Any, **options: Any) -> TracedText:
    return TracedText(_tojson(value, *args, **options), INSERTED)


@pass_eval_context
def _traced_join(
    context: EvalContext, value: Any, d: str = "", attribute: str | int | None = None
) -> str:
    text: str = do_join(context, value, _as_literal(d), attribute)
    return text


def _traced_indent(
    s: str, width: int | str = 4, first: bool = False, *more: bool, **named: bool
) -> str:
    text = do_indent(s, width, first, *more, **named)
    if not isinstance(s, TracedText):
        return text
    indents_empty = any((*more, *named.values()))
    indention = TracedText(width if isinstance(width, str) else " " * width, LITERAL)
    newline = TracedText("\n", LITERAL)
    parts: list[str] = []
    for i, line in enumerate((s + newline).splitlines()):
        if i:
            parts.append(newline)
        if (first or i) and (indents_empty or line):
            parts.append(indention)
        parts.append(line)
    traced = concat(parts)
    return traced if traced == text else TracedText(text)


def _as_literal(text: str) -> str:
    return text if isinstance(text, TracedText) else TracedText(text, LITERAL)


def compile_template(template: str, names: dict[str, Any], is_traced: bool) -> Template:
    """Compile a template. Raises jinja2's errors and errors of Python's compiler."""
    environment = TracingSandbox(names) if is_traced else Sandbox(names)
    return environment.from_string(template)
