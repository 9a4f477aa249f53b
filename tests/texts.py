"""Names and prose of a Python file, a C++ file or a page of this project."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"[A-Za-z_]\w*")

_OPTION = re.compile(r"-{0,2}([A-Za-z_][\w-]*)")
_CXX_TOKEN = re.compile(
    r'(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<name>[A-Za-z_]\w*)',
    re.DOTALL,
)
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_REMARK = re.compile(r"(?<!\S)#.*")


class Text(NamedTuple):
    """A text of a file: a name, a name quoted in prose, or a piece of prose."""

    line: int
    text: str
    kind: Literal["name", "quoted", "prose"]


def python_texts(source: str) -> Iterator[Text]:
    """Yield every name, string and comment of a Python file.

    A string that may be a name or an option counts as a name.
    """
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                yield from string_texts(line, node.value)
            continue
        for _, value in ast.iter_fields(node):
            names = value if isinstance(value, list) else [value]
            yield from (Text(line, name, "name") for name in names if isinstance(name, str))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from prose_texts(token.start[0], token.string)


def string_texts(line: int, text: str) -> Iterator[Text]:
    option = _OPTION.fullmatch(text)
    if option:
        yield Text(line, option[1].replace("-", "_"), "name")
    else:
        yield from prose_texts(line, text)


def prose_texts(line: int, text: str) -> Iterator[Text]:
    """Yield a piece of prose, and the names in its code spans."""
    yield Text(line, text, "prose")
    for code in _CODE.finditer(text):
        for at, each in enumerate(code[0].split("\n"), line + text.count("\n", 0, code.start())):
            yield from (Text(at, name, "quoted") for name in NAME.findall(_REMARK.sub("", each)))


def cxx_texts(source: str) -> Iterator[Text]:
    for token in _CXX_TOKEN.finditer(source):
        line = source.count("\n", 0, token.start()) + 1
        if token.lastgroup == "name":
            yield Text(line, token[0], "name")
        elif token.lastgroup == "string":
            yield from string_texts(line, token[0][1:-1])
        else:
            yield from prose_texts(line, token[0])


def texts(name: str, source: str) -> Iterator[Text]:
    if name.endswith(".py"):
        return python_texts(source)
    return cxx_texts(source) if name.endswith((".cpp", ".h")) else prose_texts(1, source)


@cache
def files() -> list[str]:
    """Return all handwritten files, named from the root, without the generated page of commands."""
    folders = [ROOT / name for name in ("headrace", "csrc", "tests", "benchmarks", "docs")]
    found = [
        file
        for folder in folders
        for file in folder.rglob("*")
        if file.suffix in (".py", ".cpp", ".h", ".md")
    ]
    tools = [ROOT / name for name in ("Makefile", "CMakeLists.txt", "pyproject.toml", ".ci/run")]
    names = {str(file.relative_to(ROOT)) for file in (*found, *ROOT.glob("*.md"), *tools)}
    return sorted(names - {"docs/reference/cli.md"})
