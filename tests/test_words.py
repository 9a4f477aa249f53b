"""Terms that are gone stay gone: no name, option, JSON key, message, comment or page has one of
`retired_terms.toml`.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.texts import NAME, ROOT, Text, files, texts

TERMS: dict[str, Any] = tomllib.loads((ROOT / "tests/retired_terms.toml").read_text())
IDENTIFIERS: dict[str, str] = TERMS["identifiers"]
WORDS: dict[str, str] = TERMS["words"]
PROSE = [(re.compile(entry["pattern"], re.IGNORECASE), entry["use"]) for entry in TERMS["prose"]]

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")


class Found(NamedTuple):
    """A term that is gone, and what is said instead."""

    line: int
    term: str
    use: str


def words_in(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def retired_in(text: Text) -> Iterator[Found]:
    """The terms in a text that are gone."""
    if text.kind == "prose":
        for pattern, use in PROSE:
            for match in pattern.finditer(text.text):
                yield Found(text.line + text.text.count("\n", 0, match.start()), match[0], use)
        return
    for name in text.text.split("."):
        uses = (
            [IDENTIFIERS[name]]
            if name in IDENTIFIERS
            else [WORDS[word] for word in words_in(name) if word in WORDS]
        )
        yield from (Found(text.line, text.text, use) for use in uses)


def retired_in_file(name: str) -> list[Found]:
    source = (ROOT / name).read_text()
    return sorted({found for text in texts(name, source) for found in retired_in(text)})


class TestTheTree:
    @pytest.mark.parametrize("name", files())
    def test_no_file_has_a_term_that_is_gone(self, name: str) -> None:
        assert not [
            f"{name}:{line}: {term!r}: use {use}" for line, term, use in retired_in_file(name)
        ]

    def test_no_file_is_named_by_one(self) -> None:
        names = {part.partition(".")[0] for name in files() for part in Path(name).parts}
        assert not [found for name in sorted(names) for found in retired_in(Text(0, name, "name"))]

    def test_the_glossary_explains_none(self) -> None:
        rows = re.findall(
            r"^\| ([^|]+) \|", (ROOT / "docs/internals/glossary.md").read_text(), re.MULTILINE
        )
        terms = [word for row in rows for word in NAME.findall(row)]
        assert terms
        assert not [found for term in terms for found in retired_in(Text(0, term, "name"))]


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
        assert term in {
            found.term
            for text in texts(name, "\n" + line)
            for found in retired_in(text)
            if found.line in (2, 3)
        }

    @pytest.mark.parametrize("word", WORDS)
    def test_words_are_found_in_longer_names(self, word: str) -> None:
        for name in (
            f"num_{word}",
            f"{word.upper()}_MS",
            f"Num{word.capitalize()}",
            f"max{word.capitalize()}Len",
        ):
            assert list(retired_in(Text(1, name, "name"))), name

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
            assert 3 in {
                found.line for text in texts(name, source) for found in retired_in(text)
            }, name
