"""Sessions of `AsyncLLM`, whose calls are coroutines."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from headrace.outputs import RequestOutput
from headrace.request import CheckedRequest, Pooling, RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.sessions.tree import (
    BaseNode,
    BaseSession,
    Continuation,
    Score,
    SessionHost,
    SessionOptions,
    embedding_of,
    score_of,
)

AsyncRun = Callable[[CheckedRequest], Awaitable[RequestOutput]]
"""Runs a request, and returns its result. Raises RequestFailedError."""


class AsyncNode(BaseNode["AsyncSession"]):
    """A node of an `AsyncSession`. Calls on many nodes at once share the engine's steps."""

    async def sample(
        self,
        k: int = 1,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> list["AsyncNode"]:
        """Sample `k` continuations, and return them as children, as `Session.sample` does."""
        session = self.session
        options = session.request_options(priority, timeout, adapter)
        sampling = session.sampling(self, k, params, options)
        try:
            result = await session.run(sampling.request)
        except BaseException:
            sampling.abandon()
            raise
        return sampling.children(result.outputs)

    async def score(
        self,
        continuations: Sequence[Continuation],
        *,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> list[Score]:
        """Return the log-probabilities of each continuation, as `Session.score` does."""
        session = self.session
        options = session.request_options(priority, timeout, adapter)
        requests = session.scoring(self, continuations, options)
        if len(requests) > 1:
            await session.compute(self, options)
        results = await _gather(map(session.run, requests))
        return [score_of(result, self.num_tokens) for result in results]

    async def embed(
        self,
        pooling: Pooling = "last",
        *,
        normalise: bool = False,
        priority: int = 0,
        timeout: float | None = None,
        adapter: str | None = None,
    ) -> NDArray[np.float32]:  # [dim]
        """Return the embedding of the path. Arguments and errors are as for `LLM.embed`."""
        session = self.session
        options = session.request_options(priority, timeout, adapter)
        request = session.embedding(self, pooling, normalise, options)
        return embedding_of(await session.run(request))


class AsyncSession(BaseSession[AsyncNode]):
    """A tree of texts that begins with a prompt; `AsyncLLM.session` makes one.

    `close()`, or the end of an `async with` block, closes all nodes.
    """

    def __init__(
        self,
        host: SessionHost,
        run: AsyncRun,
        prompt_token_ids: Iterable[int],
        options: SessionOptions,
    ) -> None:
        super().__init__(host, AsyncNode, prompt_token_ids, options)
        self.run = run

    async def compute(self, node: AsyncNode, options: RequestOptions) -> None:
        """Compute the path of a node, and keep its KV."""
        request = self.prefill(node, options)
        if request is not None:
            await self.run(request)

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


async def _gather(runs: Iterable[Awaitable[RequestOutput]]) -> list[RequestOutput]:
    """Wait for all results. If one fails or the caller is cancelled, the others end."""

    async def result_of(run: Awaitable[RequestOutput]) -> RequestOutput:
        return await run

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(result_of(run)) for run in runs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
