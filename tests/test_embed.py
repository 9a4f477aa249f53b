"""`LLM.embed` over a tiny model on disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.errors import RequestError, RequestFailedError
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture

PROMPTS: list[Any] = ["hello w", {"prompt_token_ids": [1, 2, 3]}, {"prompt": "hello"}]


@pytest.fixture
def llm(write_gguf: Any) -> Iterator[LLM]:  # noqa: F811
    path: Path = write_gguf()
    with LLM(str(path), backend="reference", max_model_len=64, kv_blocks=8) as llm:
        yield llm


def test_embed_returns_one_embedding_per_prompt(llm: LLM) -> None:
    for pooling in ("last", "mean", "cls"):
        vectors = llm.embed(PROMPTS, pooling)
        assert vectors.shape == (3, llm.spec.dim) and vectors.dtype == np.float32
        alone = np.concatenate([llm.embed(prompt, pooling) for prompt in PROMPTS])
        assert vectors == pytest.approx(alone, rel=1e-5)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        assert llm.embed(PROMPTS, pooling, normalise=True) == pytest.approx(
            vectors / lengths, rel=1e-5
        )
    assert llm.embed([]).shape == (0, llm.spec.dim)
    stats = llm.stats()
    assert stats.blocks_free == stats.blocks_total and stats.tokens == 0 and stats.prompt_tokens > 0


def test_embed_during_a_stream(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    next(stream)
    assert llm.embed(PROMPTS, "mean").shape == (3, llm.spec.dim)
    assert [update.result for update in stream][-1]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (7, {}, "prompts must be text, a dictionary, or a list of texts and dictionaries, not int"),
        ("", {}, "the prompt is empty"),
        ([""], {}, "the prompt is empty"),
        ([[1, 2]], {}, "a prompt must be text or a dictionary, not list"),
        ({"prompt_token_ids": [10**6]}, {}, "the vocabulary ends at"),
        ({"prompt_token_ids": [1] * 65}, {}, "65 tokens, but max_model_len 64 allows 64"),
        ("hello", {"pooling": "max"}, "pooling must be last, mean, cls"),
        ("hello", {"normalise": "yes"}, "normalise must be true or false"),
        ("hello", {"priority": 10**6}, "priority must be"),
        (["hello"], {"timeout": [1, 2]}, "timeout has 2 values for 1 prompts"),
    ],
)
def test_invalid_embed_calls_raise(llm: LLM, prompts: Any, options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.embed(prompts, **options)
    assert not llm.stats().running


def test_embed_timeout_fails_the_call(llm: LLM) -> None:
    with pytest.raises(
        RequestFailedError, match="prompt 1 timed out before its embedding"
    ) as failure:
        llm.embed(["hello", "hello w"], timeout=[None, 0])
    assert [output.embedding is None for output in failure.value.outputs] == [False, True]
