"""The end of JSON values in streamed text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.output_parsers.json_scanner import JsonScanner
from tests.server.output_parsers.test_output_parser import VALUES


def scan(pieces: list[str]) -> tuple[int, bool, bool]:
    """Return the number of scanned characters, and whether the scanner is done or has failed."""
    scanner, taken = JsonScanner(), 0
    for piece in pieces:
        taken += scanner.feed(piece, 0)
    scanner.finish()
    return taken, scanner.done, scanner.failed


@given(
    VALUES,
    st.sampled_from(["", " ", "}", "]", ",", ' "x"']),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_json_scanner_ends_with_the_value(
    value: Any, after: str, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert scan([text + after]) == (len(text), True, False)
    assert scan(list(text + after)) == (len(text), True, False)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        *[("{", 1), ("[1", 2), ('{"a', 3), ('"\\', 2), ("", 0)],  # the text ends too early
        *[
            ("}", 0),
            ("<", 0),
            (" 1", 0),
            ("[1}", 2),
            ('{"a": [}', 7),
            ("{'a'", 1),
            ("[<", 1),
            ("{[}]", 2),
        ],  # other text comes
    ],
)
def test_json_scanner_fails(text: str, taken: int) -> None:
    assert scan([text]) == scan(list(text)) == (taken, False, True)


@pytest.mark.parametrize("text", ['{"a" 1}', "[1,]", '"\n"', '"\\x"', "{1: 2}"])
def test_json_scanner_ignores_separators(text: str) -> None:
    assert scan([text]) == (len(text), True, False)
