"""`AsyncLLM`: `LLM` for asyncio programs, whose many tasks share the engine's steps."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from headrace.config import SERVING
from headrace.errors import RequestFailedError
from headrace.llm import BaseLLM
from headrace.outputs import RequestOutput, Update
from headrace.prompts import Message, Prompt, PromptOptions, TextOptions
from headrace.request import CheckedRequest, Pooling, PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.sessions.async_session import AsyncSession
from headrace.sessions.tree import MAX_NODES, SessionHost, SessionOptions


class _AsyncInbox:
    """Passes the updates of one request from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Update | BaseException] = asyncio.Queue()

    def put(self, item: Update | BaseException, /) -> None:
        """Add an update, or the error that ends the request. Called in the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed, so no task waits
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def get(self) -> Update:
        """Wait for the next update. Raises the error that ended the request."""
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item


class AsyncLLM(BaseLLM):
    """A language model in this process, for programs with an event loop.

    Each request is a task, and concurrent requests share the engine's steps. Cancelling
    a task ends its request. Prompts are tokenised in the loop's thread pool.

    The constructor loads the model and blocks: call it before the loop runs, or use
    `await asyncio.to_thread(AsyncLLM, model)`. `options` are fields of `EngineConfig`,
    with the defaults of `config.SERVING`, which keep the time between tokens short.
    `close()`, or the end of a `with` or `async with` block, frees the model's memory.
    """

    def __init__(self, model: str | PathLike[str] = "smollm2", **options: Any) -> None:
        super().__init__(model, options, SERVING)

    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **prompt_options: Unpack[PromptOptions],
    ) -> RequestOutput:
        """Continue a prompt, or respond to a conversation, and return the complete result.

        Arguments and errors are as for `LLM.stream`.
        """
        options = RequestOptions(
            priority=priority, timeout=timeout, cache_salt=cache_salt, adapter=adapter
        )
        return await self._run(await self._checked(prompt, params, prompt_options, options))

    async def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **prompt_options: Unpack[PromptOptions],
    ) -> AsyncGenerator[Update]:
        """Continue a prompt, or respond to a conversation, and yield updates as tokens arrive.

        Arguments, updates and errors are as for `LLM.stream`. Closing the iterator ends
        the request.
        """
        options = RequestOptions(
            priority=priority, timeout=timeout, cache_salt=cache_salt, adapter=adapter
        )
        request = await self._checked(prompt, params, prompt_options, options)
        request_id, inbox, result = next(self._ids), _AsyncInbox(), None
        try:
            self._thread.add([request], [request_id], inbox)
            while not result:
                update = await inbox.get()
                result = update.result
                if result and result.error:
                    raise RequestFailedError(f"the request failed: {result.error}", [result])
                yield update
        finally:
            self._thread.abort([request_id])

    async def embed(
        self,
        prompt: Prompt,
        pooling: Pooling = "last",
        *,
        normalise: bool = False,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **text_options: Unpack[TextOptions],
    ) -> NDArray[np.float32]:  # [dim]
        """Return the embedding of a prompt. Arguments and errors are as for `LLM.embed`."""
        options = RequestOptions(
            priority=priority, timeout=timeout, cache_salt=cache_salt, adapter=adapter
        )
        pooling_params = PoolingParams(pooling=pooling, normalise=normalise)
        request = await self._checked(prompt, None, text_options, options, pooling_params)
        result = await self._run(request)
        if result.embedding is None:
            raise RequestFailedError("the prompt timed out before its embedding", [result])
        return result.embedding

    async def session(
        self,
        prompt: Prompt | Sequence[Message],
        *,
        seed: int | None = None,
        max_nodes: int = MAX_NODES,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **prompt_options: Unpack[PromptOptions],
    ) -> AsyncSession:
        """Compute a prompt or a conversation, and return a session whose root it is.

        Arguments and errors are as for `LLM.session`.
        """
        options = SessionOptions(
            seed=seed, max_nodes=max_nodes, cache_salt=cache_salt, adapter=adapter
        )

        def make(
            host: SessionHost, token_ids: Iterable[int], options: SessionOptions
        ) -> AsyncSession:
            return AsyncSession(host, self._run, token_ids, options)

        start = partial(self._start_session, make, prompt, prompt_options, options)
        session = await asyncio.get_running_loop().run_in_executor(None, start)
        await session.compute(session.root, session.request_options())
        return session

    async def _checked(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None,
        prompt_options: PromptOptions | TextOptions,
        options: RequestOptions,
        pooling: PoolingParams | None = None,
    ) -> CheckedRequest:
        """Read and check a prompt in the loop's thread pool."""
        self._thread.check_open()
        check = partial(self._check_one, prompt, params, prompt_options, options, pooling)
        return await asyncio.get_running_loop().run_in_executor(None, check)

    async def _run(self, request: CheckedRequest) -> RequestOutput:
        request_id, inbox = next(self._ids), _AsyncInbox()
        try:
            self._thread.add([request], [request_id], inbox, only_results=True)
            result = (await inbox.get()).result
        finally:
            self._thread.abort([request_id])
        assert result is not None, "with only_results the first update has the result"
        if result.error:
            raise RequestFailedError(f"the request failed: {result.error}", [result])
        return result

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)
