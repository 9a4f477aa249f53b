"""What all routes work with: the model's name, its prompts, the engine, and how much is taken
on.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar
from uuid import uuid4

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.errors import RequestError
from headrace.prompts import PromptReader, TokenizedPrompt
from headrace.remote import frames
from headrace.remote.engine import ServedEngine
from headrace.remote.errors import NotReadyError
from headrace.remote.stream import Stream
from headrace.request import PoolingParams, RequestOptions, SamplingParams
from headrace.server.asgi import Call
from headrace.server.errors import ApiError, beyond_context, invalid, too_long
from headrace.server.metrics import Metrics
from headrace.server.output_parsers.parser import AnswerStyle
from headrace.server.roofline import Roofline
from headrace.server.settings import Settings

_T = TypeVar("_T")


class ServedModel:
    """One model behind the routes."""

    def __init__(
        self,
        settings: Settings,
        engine: ServedEngine,
        prompts: PromptReader,
        tokenizer: Tokenizer,
        advised_sampling: Mapping[str, Any],
        answer_style: AnswerStyle,
        metrics: Metrics,
        roofline: Roofline,
        fingerprint: str = "",
    ) -> None:
        self.roofline = roofline
        self.boot = uuid4().hex
        """Made up, so that this process is not taken for an earlier one."""
        self.fingerprint = fingerprint
        """Of the model, for the frontend of a worker: see `headrace.checkpoint.fingerprint`."""
        self.watchers = 0
        """Pages that are open: streams of statistics."""
        self.answer_style = answer_style
        """How the model writes reasoning and calls of tools."""
        self.control_tokens = {
            tokenizer.token_bytes(token).decode(errors="replace"): token
            for token in tokenizer.special_ids
        }
        """Their ids, by their texts."""
        self.end_tokens = tuple(
            tokenizer.token_bytes(token).decode(errors="replace")
            for token in sorted(tokenizer.eos_ids)
        )
        self.advised_sampling = advised_sampling
        """Parameters of requests that leave them out, by field of `SamplingParams`."""
        self.settings = settings
        self.engine = engine
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.started = int(time.time())
        self.draining = False
        """Whether no new requests are taken."""
        self._sequences = 0
        self._by_key: Counter[str] = Counter()

    @property
    def most_sequences(self) -> int:
        """Those that run and those that may wait."""
        return (
            self.engine.hello.max_num_seqs if self.engine.hello else 0
        ) + self.settings.max_waiting

    @property
    def under_way(self) -> int:
        """Sequences that were admitted and have not ended."""
        return self._sequences

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a model's name means. Raises ApiError for a name that is none of ours;
        no name is the model's own.
        """
        if model is None or model in ("", self.settings.model_name):
            return None
        if model in self.engine.adapters:
            return model
        known = ", ".join([self.settings.model_name, *self.engine.adapters])
        raise ApiError(
            404,
            "model_not_found",
            f"there is no model of that name; there are: {known}",
            param="model",
        )

    @contextmanager
    def admitted(self, call: Call, sequences: int) -> Iterator[None]:
        """Count a request, before any work is done for it. Raises ApiError where there is too much
        already.
        """
        if self.draining:
            raise NotReadyError("closed", "")
        if not self.engine.ready:
            raise NotReadyError(self.engine.state, "")
        if self._sequences + sequences > self.most_sequences:
            raise ApiError(
                503,
                "server_overloaded",
                "too many requests wait already",
                kind="server_error",
                retry_after=1,
            )
        key = call.key or ""
        if self.settings.max_per_key and self._by_key[key] >= self.settings.max_per_key:
            raise ApiError(
                429,
                "rate_limit_exceeded",
                "too many requests of this key are under way",
                kind="rate_limit_error",
                retry_after=1,
            )
        self._sequences += sequences
        self._by_key[key] += 1
        try:
            yield
        finally:
            self._sequences -= sequences
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """The result of work that may take long, such as tokenising: the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(None, work)

    async def tokens_of(
        self, read: Callable[[], TokenizedPrompt], param: str, max_tokens: int | None = None
    ) -> list[int]:
        """The tokens of a prompt, read in a thread. Raises ApiError for one that cannot be read, or
        leaves no place for the answer.
        """
        try:
            ids = list((await self.in_thread(read)).token_ids)
        except RequestError as error:
            if "context" in str(error):
                raise beyond_context(str(error), self.prompts.max_model_len, param) from None
            raise invalid(str(error), param) from None
        if len(ids) + (1 if max_tokens is None else max_tokens) > self.prompts.max_model_len:
            raise too_long(len(ids), max_tokens, self.prompts.max_model_len, param)
        return ids

    def _salt(self, call: Call, asked: str | None) -> str | None:
        """The scope of the prefix cache: a key's own where there are several keys, and what the
        request asks for within that.
        """
        if len(self.settings.api_keys) < 2:
            return asked
        return blake2b(
            (asked or "").encode(), key=blake2b((call.key or "").encode()).digest(), digest_size=16
        ).hexdigest()

    @asynccontextmanager
    async def submitted(
        self,
        call: Call,
        prompts: list[list[int]],
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        pooling: PoolingParams | None = None,
    ) -> AsyncIterator[list[Stream]]:
        """A stream for each prompt of a request; all of them end with the context."""
        options = replace(
            options,
            timeout=self.settings.request_timeout,
            cache_salt=self._salt(call, options.cache_salt),
        )
        streams: list[Stream] = []
        record = call.record
        record.model, record.prompt_tokens = (
            options.adapter or self.settings.model_name,
            sum(map(len, prompts)),
        )
        try:
            for token_ids in prompts:
                submission = self.engine.submit(token_ids, params, options, pooling=pooling)
                streams.append(await call.while_connected(submission))
            yield streams
        finally:
            for stream in streams:
                stream.close()
                record.add_stream(stream)


async def merge(streams: list[Stream]) -> AsyncIterator[tuple[int, frames.News | frames.Ended]]:
    """What comes of several requests, each with its index, as it comes."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, frames.News | frames.Ended] | Exception] = asyncio.Queue()

    async def pump(index: int, stream: Stream) -> None:
        try:
            async for event in stream:
                queue.put_nowait((index, event))
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            left -= isinstance(item[1], frames.Ended)
            yield item
    finally:
        for task in tasks:
            task.cancel()


def timed_out() -> ApiError:
    """A request whose time was up."""
    return ApiError(504, "timeout", "the request took longer than this server allows")


def seed_of(seed: int | None) -> int | None:
    """A seed of OpenAI's, which may be below 0, as one of ours."""
    return None if seed is None else seed % 2**64
