"""Terms that are gone stay gone: no name, option, JSON key, message, comment or page has one of `retired_terms.toml`."""

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TERMS: dict[str, Any] = tomllib.loads((ROOT / "tests/retired_terms.toml").read_text())
IDENTIFIERS: dict[str, str] = TERMS["identifiers"]
WORDS: dict[str, str] = TERMS["words"]
PROSE = [(re.compile(entry["pattern"], re.IGNORECASE), entry["use"]) for entry in TERMS["prose"]]

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_OPTION = re.compile(r"-{0,2}([A-Za-z_][\w-]*)")
_CXX_TOKEN = re.compile(r'(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<name>[A-Za-z_]\w*)', re.DOTALL)
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_REMARK = re.compile(r"(?<!\S)#.*")


class Text(NamedTuple):
    """Some text of a file: a name, or prose."""

    line: int
    text: str
    is_name: bool


class Found(NamedTuple):
    """A term that is gone, and what is said instead."""

    line: int
    term: str
    use: str


def python_texts(source: str) -> Iterator[Text]:
    """Every name, string and comment of a Python file. A string that could be a name, or an option, counts as one."""
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                yield from string_texts(line, node.value)
            continue
        for _, value in ast.iter_fields(node):
            names = value if isinstance(value, list) else [value]
            yield from (Text(line, name, True) for name in names if isinstance(name, str))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from prose_texts(token.start[0], token.string)


def string_texts(line: int, text: str) -> Iterator[Text]:
    option = _OPTION.fullmatch(text)
    if option:
        yield Text(line, option[1].replace("-", "_"), True)
    else:
        yield from prose_texts(line, text)


def prose_texts(line: int, text: str) -> Iterator[Text]:
    """Prose as a whole, and the names in its code."""
    yield Text(line, text, False)
    for code in _CODE.finditer(text):
        for at, each in enumerate(code[0].split("\n"), line + text.count("\n", 0, code.start())):
            yield from (Text(at, name, True) for name in _NAME.findall(_REMARK.sub("", each)))


def cxx_texts(source: str) -> Iterator[Text]:
    for token in _CXX_TOKEN.finditer(source):
        line = source.count("\n", 0, token.start()) + 1
        if token.lastgroup == "name":
            yield Text(line, token[0], True)
        elif token.lastgroup == "string":
            yield from string_texts(line, token[0][1:-1])
        else:
            yield from prose_texts(line, token[0])


def texts(name: str, source: str) -> Iterator[Text]:
    if name.endswith(".py"):
        return python_texts(source)
    return cxx_texts(source) if name.endswith((".cpp", ".h")) else prose_texts(1, source)


def words_in(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def retired_in(text: Text) -> Iterator[Found]:
    """The terms in a text that are gone."""
    if not text.is_name:
        for pattern, use in PROSE:
            for match in pattern.finditer(text.text):
                yield Found(text.line + text.text.count("\n", 0, match.start()), match[0], use)
    elif text.text.rpartition(".")[2] in IDENTIFIERS:
        yield Found(text.line, text.text, IDENTIFIERS[text.text.rpartition(".")[2]])
    else:
        yield from (Found(text.line, text.text, WORDS[word]) for word in words_in(text.text) if word in WORDS)


@cache
def files() -> list[str]:
    """All files that are looked at: those that git knows, and new ones that it does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = (".py", ".cpp", ".h", ".md", "Makefile", "pyproject.toml", "CMakeLists.txt", ".ci/run")
    return [name for name in listed if name.endswith(kinds) and not name.startswith("tests/data/") and (ROOT / name).exists()]


def retired_in_file(name: str) -> list[Found]:
    source = (ROOT / name).read_text()
    return sorted({found for text in texts(name, source) for found in retired_in(text)})


class TestTheTree:
    @pytest.mark.parametrize("name", files())
    def test_no_file_has_a_term_that_is_gone(self, name: str) -> None:
        assert not [f"{name}:{line}: {term!r}: use {use}" for line, term, use in retired_in_file(name)]

    def test_no_file_is_named_by_one(self) -> None:
        names = {part.partition(".")[0] for name in files() for part in Path(name).parts}
        assert not [found for name in sorted(names) for found in retired_in(Text(0, name, True))]

    def test_the_glossary_explains_none(self) -> None:
        rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
        terms = [word for row in rows for word in _NAME.findall(row)]
        assert terms
        assert not [found for term in terms for found in retired_in(Text(0, term, True))]


class TestTheFinder:
    @pytest.mark.parametrize("term", [*IDENTIFIERS, *WORDS])
    @pytest.mark.parametrize(
        ("name", "source"),
        [
            ("a.py", "def f({0}): pass"),
            ("a.py", "x.{0} = 1"),
            ("a.py", "class {0}: pass"),
            ("a.py", "from a import b as {0}"),
            ("a.py", 'f"{{x.{0}}}"'),
            ("a.py", 'parser.add_argument("--{0}")'),
            ("a.py", 'record["{0}"] = 1'),
            ("a.py", "x = 1  # see `{0}`"),
            ("a.h", "int {0} = 0;"),
            ("a.h", "// See `{0}`."),
            ("a.cpp", 'm.def("{0}", &f);'),
            ("a.md", "The option `{0}` says so."),
            ("a.md", "```\n{0} = 4  # rows\n```"),
        ],
    )
    def test_names_are_found(self, term: str, name: str, source: str) -> None:
        line = source.format(term)
        assert term in {found.term for text in texts(name, "\n" + line) for found in retired_in(text) if found.line in (2, 3)}

    @pytest.mark.parametrize("word", WORDS)
    def test_words_are_found_in_longer_names(self, word: str) -> None:
        for name in (f"num_{word}", f"{word.upper()}_MS", f"Num{word.capitalize()}", f"max{word.capitalize()}Len"):
            assert list(retired_in(Text(1, name, True))), name

    @pytest.mark.parametrize("entry", TERMS["prose"], ids=lambda entry: entry["use"])
    def test_phrases(self, entry: dict[str, Any]) -> None:
        pattern = re.compile(entry["pattern"], re.IGNORECASE)
        assert entry["found"] and all(map(pattern.search, entry["found"]))
        assert entry["spared"] and not list(filter(pattern.search, entry["spared"]))

    def test_where_prose_is(self) -> None:
        phrase = TERMS["prose"][0]["found"][0]
        for name, source in {
            "a.py": f'"""First line.\n\n{phrase}."""\n',
            "b.py": f"\n\nx = 1  # {phrase}\n",
            "c.py": f'\n\nprint(f"{phrase}: {{x}}")\n',
            "d.cpp": f"\n\n// {phrase}\n",
            "e.cpp": f'\n\nthrow Error("{phrase}");\n',
            "f.md": f"\n\nThis is {phrase}.\n",
        }.items():
            assert 3 in {found.line for text in texts(name, source) for found in retired_in(text)}, name
