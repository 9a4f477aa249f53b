"""The face for programs with an event loop: requests go into the engine's thread, and what comes of
them comes back into the loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from headrace.config import SERVING
from headrace.errors import RequestFailedError
from headrace.face import ChatOptions, Face
from headrace.prompts import Message, Prompt
from headrace.request import (
    CheckedRequest,
    Pooling,
    PoolingParams,
    RequestOptions,
    RequestOutput,
    SamplingParams,
    Update,
)


class _Inbox:
    """The updates of one request, handed from the engine's thread to the loop that asks for
    them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Update | BaseException] = asyncio.Queue()

    def put(self, item: Update | BaseException, /) -> None:
        """Add an update, or the reason why there will be no more."""
        with suppress(RuntimeError):  # the loop is closed, and no task waits
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def get(self) -> Update:
        """The next update. Raises what ended the call."""
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item


class AsyncLLM(Face):
    """`LLM` for programs with an event loop: many requests at once, each a task, in shared steps.

    Loading takes its time in the constructor: call it before the loop runs, or by `await
    asyncio.to_thread(AsyncLLM, model)`. The options are the fields of `EngineConfig`, over the
    defaults in `config.SERVING`, which keep the time between two tokens short. Prompts are read in
    threads of the loop. Use it in a `with` or `async with` block, or call `close()`. A task that is
    cancelled ends its request.
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
        **chat_options: Unpack[ChatOptions],
    ) -> RequestOutput:
        """Continue a prompt, or answer a conversation: the whole result. Arguments and errors are
        those of `LLM.stream`.
        """
        options = RequestOptions(
            priority=priority, timeout=timeout, cache_salt=cache_salt, adapter=adapter
        )
        return await self._run(await self._checked(prompt, params, chat_options, options))

    async def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **chat_options: Unpack[ChatOptions],
    ) -> AsyncGenerator[Update]:
        """The same update by update, as `LLM.stream` gives them. Leaving the iterator ends the
        request.
        """
        options = RequestOptions(
            priority=priority, timeout=timeout, cache_salt=cache_salt, adapter=adapter
        )
        request = await self._checked(prompt, params, chat_options, options)
        request_id, inbox, result = str(next(self._numbers)), _Inbox(), None
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
    ) -> NDArray[np.float32]:  # [dim]
        """The vector of a prompt. Arguments and errors are those of `LLM.embed`."""
        options = RequestOptions(
            priority=priority, timeout=timeout, cache_salt=cache_salt, adapter=adapter
        )
        how = PoolingParams(pooling=pooling, normalise=normalise)
        result = await self._run(await self._checked(prompt, None, {}, options, how))
        if result.embedding is None:
            raise RequestFailedError("the prompt was not embedded in time", [result])
        return result.embedding

    async def _checked(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None,
        chat_options: ChatOptions,
        options: RequestOptions,
        pooling: PoolingParams | None = None,
    ) -> CheckedRequest:
        """Read and check a prompt in a thread of the loop's executor."""
        self._thread.check_open()
        check = partial(self._check_one, prompt, params, chat_options, options, pooling)
        return await asyncio.get_running_loop().run_in_executor(None, check)

    async def _run(self, request: CheckedRequest) -> RequestOutput:
        request_id, inbox = str(next(self._numbers)), _Inbox()
        try:
            self._thread.add([request], [request_id], inbox, only_results=True)
            result = (await inbox.get()).result
        finally:
            self._thread.abort([request_id])
        assert result is not None, "only results come"
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
