"""`AsyncLLM`: results equal to `LLM`, concurrent requests, and cancelled tasks."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.errors import ClosedError, RequestError, RequestFailedError
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture
from tests.test_llm import MESSAGES, clean, model  # noqa: F401 - a fixture

_T = TypeVar("_T")
PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True, logprobs=1)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS: list[Any] = ["hello", "w", {"prompt_token_ids": [5, 6, 7]}, MESSAGES]


def with_llm(model: str, work: Callable[[AsyncLLM], Awaitable[_T]]) -> _T:  # noqa: F811
    async def run() -> _T:
        async with await asyncio.to_thread(
            AsyncLLM, model, max_model_len=64, kv_blocks=8, threads=1
        ) as llm:
            result = await work(llm)
            while not await asyncio.to_thread(clean, llm):
                await asyncio.sleep(0.001)
            return result

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.fixture
def expected(model: str) -> list[Any]:  # noqa: F811
    with LLM(model, max_model_len=64, kv_blocks=8, threads=1) as llm:
        return [*llm.generate(PROMPTS[:3], PARAMS), *llm.chat(MESSAGES, PARAMS)]


def test_concurrent_generate_equals_llm(model: str, expected: list[Any]) -> None:  # noqa: F811
    async def work(llm: AsyncLLM) -> list[Any]:
        return list(await asyncio.gather(*(llm.generate(prompt, PARAMS) for prompt in PROMPTS)))

    assert [result.outputs for result in with_llm(model, work)] == [
        result.outputs for result in expected
    ]


def test_concurrent_streams_equal_llm(model: str, expected: list[Any]) -> None:  # noqa: F811
    async def one(llm: AsyncLLM, prompt: Any) -> Any:
        updates = [update async for update in llm.stream(prompt, PARAMS)]
        assert all(update.result is None for update in updates[:-1])
        result = updates[-1].result
        assert result and "".join(update.text for update in updates) == result.outputs[0].text
        return result.outputs

    async def work(llm: AsyncLLM) -> list[Any]:
        return list(await asyncio.gather(*(one(llm, prompt) for prompt in PROMPTS)))

    assert with_llm(model, work) == [result.outputs for result in expected]


def test_concurrent_embeddings_equal_llm(model: str) -> None:  # noqa: F811
    async def work(llm: AsyncLLM) -> list[Any]:
        return list(
            await asyncio.gather(
                llm.embed("hello"), llm.embed("w", "mean", normalise=True), llm.generate("w", LONG)
            )
        )

    last, mean, _ = with_llm(model, work)
    with LLM(model, max_model_len=64, kv_blocks=8, threads=1) as llm:
        assert np.array_equal(last, llm.embed("hello")[0]) and np.array_equal(
            mean, llm.embed("w", "mean", normalise=True)[0]
        )


def test_cancelled_task_ends_its_request(model: str) -> None:  # noqa: F811
    async def work(llm: AsyncLLM) -> None:
        for _ in range(20):
            task = asyncio.ensure_future(llm.generate("hello", LONG))
            await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            stream = llm.stream("hello", LONG)
            await anext(stream)
            await stream.aclose()

    with_llm(model, work)


def test_async_errors(model: str) -> None:  # noqa: F811
    async def work(llm: AsyncLLM) -> None:
        for prompt, options in [
            ("", {}),
            (5, {}),
            ("a" * 999, {}),
            ([{"role": "user"}, 5], {}),
            ("a", {"tools": []}),
        ]:
            with pytest.raises(RequestError):
                await llm.generate(prompt, LONG, **options)  # type: ignore[arg-type]
        with pytest.raises(RequestFailedError, match="timed out before"):
            await llm.embed("hello", timeout=0)
        # So many that the last have not ended before the close.
        waiting = [asyncio.ensure_future(llm.generate("hello", LONG)) for _ in range(50)]
        await asyncio.sleep(0)
        await asyncio.to_thread(llm.close)
        with pytest.raises(ClosedError):
            await waiting[-1]
        await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(ClosedError):
            await llm.generate("hello", LONG)

    async def run() -> None:
        llm = AsyncLLM(model, max_model_len=64, kv_blocks=8, threads=1)
        await work(llm)

    asyncio.run(asyncio.wait_for(run(), 60))
