"""Rates of the habits that make prose hard to read, in docstrings, messages and pages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.texts import ROOT

HABITS = {
    "a clause as a noun (what X is)": (
        r"\b[Ww]hat (?:is|are|was|were|has|have|it|they|there|a |an |the "
        r"|comes|came|goes|makes|all|"
        r"each|one|some|any|can|does|do|runs|keeps|took|gives|\w+s\b)",
        10,
    ),
    "'where' for if or when": (
        r"\b[Ww]here (?:it|there|they|that|a |an |the |no |none|one|all|each|nothing|these|those|"
        r"some|several)",
        10,
    ),
    "pointing back (those of, one of)": (r"\b(?:those|that|these|one) of\b", 10),
    "behind or beside for after or with": (r"\b(?:[Bb]ehind|[Bb]eside|in front of)\b", 10),
    "so many, as many": (r"\b[Ss]o (?:many|much)\b|\bas many\b", 5),
    "anew, told, said, begun, wanted, asked, gone": (
        r"\b(?:anew|told|said|begun|wanted|asked|gone)\b",
        10,
    ),
    "nothing, none, no other": (r"\b(?:nothing|none|no other|not even)\b", 20),
}
"""Each habit with its pattern and its limit, in matches per 10,000 words.

The documentation of mlx-lm, mini-sglang, gpt-fast and nano-vllm has 0 to 7 of each.
"""

PAGES = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks/README.md"]
GENERATED = {ROOT / "docs/reference/cli.md", ROOT / "docs/reference/fields.md"}


def strings(tree: ast.Module) -> Iterator[tuple[bool, str]]:
    """Every string of a module, and whether it is a docstring."""
    expressions = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    docstrings = {id(value) for value in expressions if isinstance(value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield id(node) in docstrings, node.value


def prose() -> dict[str, str]:
    """All docstrings, all messages and help texts of the package, and all pages."""
    docstrings, messages = list[str](), list[str]()
    for file in sorted((ROOT / "headrace").rglob("*.py")):
        for is_docstring, text in strings(ast.parse(file.read_text())):
            if is_docstring:
                docstrings.append(text)
            elif len(text.split()) >= 4:
                messages.append(text)
    pages = [page.read_text() for page in PAGES if page not in GENERATED]
    return {
        kind: "\n".join(texts)
        for kind, texts in zip(KINDS, (docstrings, messages, pages), strict=True)
    }


KINDS = ("docstrings", "messages", "pages")


def rate(pattern: str, text: str) -> float:
    """Matches per 10,000 words."""
    return 1e4 * len(re.findall(pattern, text)) / len(re.findall(r"[A-Za-z']+", text))


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return prose()


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("kind", KINDS)
def test_prose_rates(kind: str, habit: str, texts: dict[str, str]) -> None:
    pattern, limit = HABITS[habit]
    assert rate(pattern, texts[kind]) <= limit


@pytest.mark.parametrize(
    ("habit", "example"),
    list(zip(HABITS, ["what comes of it", "where there is a GPU", "those of the first", "beside it",
                      "as many as fit", "begun anew", "nothing else"], strict=True)),
)  # fmt: skip
def test_prose_habits_are_found(habit: str, example: str) -> None:
    assert re.search(HABITS[habit][0], example)


def test_line_widths() -> None:
    """Most lines are far shorter than the limit of 100 columns."""
    for pattern in ("headrace/**/*.py", "csrc/*"):
        files: list[Path] = [file for file in ROOT.glob(pattern) if file.suffix != ".pyi"]
        widths = sorted(len(line) for file in files for line in file.read_text().splitlines())
        assert widths[len(widths) * 9 // 10] <= 88
