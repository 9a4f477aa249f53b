"""The native reader of string arrays: their content, and lengths that leave the file."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native


def packed(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def array(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


@given(
    texts=st.lists(st.text(max_size=9), max_size=6),
    before=st.binary(max_size=9),
    behind=st.binary(max_size=9),
)
def test_strings_round_trip(texts: list[str], before: bytes, behind: bytes) -> None:
    data = packed([text.encode(errors="replace") for text in texts])
    file, end = array(before + data + behind), len(before) + len(data)
    expected = [text.encode(errors="replace").decode() for text in texts]
    assert _native.read_strings(file, len(before), len(texts)) == (expected, end)
    assert _native.skip_strings(file, len(before), len(texts)) == end


@given(
    data=st.binary(max_size=40),
    offset=st.integers(0, 2**64 - 1) | st.integers(0, 40),
    count=st.integers(1, 2**64 - 1) | st.integers(1, 4),
)
def test_any_bytes(data: bytes, offset: int, count: int) -> None:
    file, at, left = array(data), offset, count
    while (
        left
        and at + 8 <= len(data)
        and at + 8 + int.from_bytes(data[at : at + 8], "little") <= len(data)
    ):
        at, left = at + 8 + int.from_bytes(data[at : at + 8], "little"), left - 1
    if not left:
        assert _native.skip_strings(file, offset, count) == at
        return
    with pytest.raises(IndexError, match="past the end"):
        _native.skip_strings(file, offset, count)
    with pytest.raises((IndexError, UnicodeDecodeError)):
        _native.read_strings(file, offset, count)


def test_strings_that_are_not_utf8() -> None:
    with pytest.raises(UnicodeDecodeError):
        _native.read_strings(array(packed([b"a", b"\xff"])), 0, 2)


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_cut_at_the_first_space(texts: list[str]) -> None:
    assert _native.cut_at_space(texts) == [
        (left, right) for left, _, right in (text.partition(" ") for text in texts)
    ]
