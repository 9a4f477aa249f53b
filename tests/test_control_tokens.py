"""Control tokens as stop strings and bad words, although the text leaves them out."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import RequestFailedError
from headrace.structured_outputs import StructuredOutputs
from tests.checkpoint.conftest import write_tiny_gguf

MARK, END = "<|im_start|>", "<|im_end|>"  # the tokens 1 and 2
GRAMMAR = StructuredOutputs(grammar=f'start: "ab" {MARK} "c" {MARK} "d"')
"""The model has to say it, so that it needs no training."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("control") / "tiny.gguf")
    with LLM(path, backend="reference", max_model_len=64) as llm:
        yield llm


def said(llm: LLM, **params: Any) -> tuple[str, str | None, Any]:
    """Return text, finish reason and stop reason, which a stream gives too."""
    sampling = SamplingParams(temperature=0, max_tokens=8, **params)
    output = llm.generate("a", sampling)[0].outputs[0]
    assert "".join(llm.stream_text("a", sampling)) == output.text
    return output.text, output.finish_reason, output.stop_reason


@pytest.mark.parametrize(
    ("stop", "text"),
    [(MARK, "ab"), (f"b{MARK}", "a"), (f"{MARK}c", "ab"), (f"c{MARK}d", "ab"), ("bc", "a")],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(llm: LLM, stop: str, text: str, include: bool) -> None:
    expected = text + (stop if include else "")
    found = said(llm, structured_outputs=GRAMMAR, stop=[stop], include_stop_str_in_output=include)
    assert found == (expected, "stop", stop)


def test_an_end_token_as_a_stop_string(llm: LLM) -> None:
    """It ends the output anyway; with `ignore_eos` the stop string does."""
    only = {"allowed_token_ids": [2]}
    assert said(llm, stop=END, **only) == ("", "stop", None)
    assert said(llm, stop=END, ignore_eos=True, **only) == ("", "stop", END)
    assert said(llm, ignore_eos=True, **only) == ("", "length", None)


@pytest.mark.parametrize("word", [MARK, f" {MARK}", f"{MARK}{MARK}"])
def test_bad_words(llm: LLM, word: str) -> None:
    """The likeliest token is the mark; a word of two marks allows a single one."""
    params = SamplingParams(
        temperature=0, max_tokens=6, logit_bias={1: 100}, bad_words=[word], ignore_eos=True
    )
    ids = llm.generate("a", params)[0].outputs[0].token_ids
    assert (1 in ids) == (word == MARK * 2)
    assert (1, 1) not in pairwise(ids)


def test_a_bad_word_that_a_grammar_needs(llm: LLM) -> None:
    with pytest.raises(RequestFailedError, match="no token can follow"):
        said(llm, structured_outputs=GRAMMAR, bad_words=[MARK])
