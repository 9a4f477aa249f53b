"""The state that all routes share."""

import asyncio
import reprlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.errors import RequestError
from headrace.json_schema import shown_paths
from headrace.messages import MessageError
from headrace.prompts import PromptReader, TokenizedPrompt
from headrace.remote import frames
from headrace.remote.engine import RemoteEngine
from headrace.remote.errors import NotReadyError
from headrace.remote.stream import Stream
from headrace.request import PoolingParams, RequestOptions
from headrace.sampling.sampler import derive_seed
from headrace.sampling_params import SamplingParams
from headrace.server.admissions import Admissions
from headrace.server.errors import (
    ApiError,
    context_exceeded,
    invalid,
    message_error,
    prompt_too_long,
)
from headrace.server.http_exchange import HttpExchange
from headrace.server.metrics import Metrics
from headrace.server.output_parsers.parser import OutputFormat
from headrace.server.served_sessions import Sessions
from headrace.server.settings import Settings
from headrace.server.step_roofline import StepRoofline
from headrace.server.step_watch import StepWatch

DROPPED_HEADER = "x-dropped-schema-keywords"
"""Header with the paths of schema keywords that the response need not have."""
_T = TypeVar("_T")


class Truncation(NamedTuple):
    """How a prompt is cut: vLLM's `truncate_prompt_tokens` and `truncation_side`."""

    max_tokens: int | None = None
    """Max tokens of the prompt; None: no limit; -1: as many as fit."""
    side: str | None = None
    """The end that is cut off: left (None) or right."""

    def cut(self, ids: list[int], most: int) -> list[int]:
        if self.max_tokens is None:
            return ids
        kept = most if self.max_tokens < 0 else self.max_tokens
        kept = max(kept, 1)
        return ids[:kept] if self.side == "right" else ids[-kept:]


NO_TRUNCATION = Truncation()


class ServerState:
    def __init__(
        self,
        *,
        settings: Settings,
        engine: RemoteEngine,
        prompt_reader: PromptReader,
        tokenizer: Tokenizer,
        advised_sampling: Mapping[str, Any],
        output_format: OutputFormat,
        metrics: Metrics,
        roofline: StepRoofline,
        watch: StepWatch,
        fingerprint: str = "",
        weights_digest: str = "",
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.prompt_reader = prompt_reader
        self.tokenizer = tokenizer
        self.advised_sampling = advised_sampling
        self.output_format = output_format
        self.metrics = metrics
        self.roofline = roofline
        self.watch = watch
        self.fingerprint = fingerprint
        """See `headrace.checkpoint.fingerprint`."""
        self.weights_digest = weights_digest
        """See `headrace.quant.digest`."""

        self.control_tokens = {
            tokenizer.token_bytes(token).decode(errors="replace"): token
            for token in tokenizer.special_ids
        }
        self.end_tokens = tuple(
            tokenizer.token_bytes(token).decode(errors="replace")
            for token in sorted(tokenizer.eos_ids)
        )

        self.started = int(time.time())
        self.boot_id = uuid4().hex
        """Tells a frontend that this process was restarted."""
        self.draining = False
        self.num_stats_streams = 0
        self.sessions = Sessions(self.settings.max_sessions)
        self._admissions = Admissions()
        self._requests_by_key: Counter[str] = Counter()

    @property
    def max_sequences(self) -> int:
        info = self.engine.info
        return (info.max_num_seqs if info else 0) + self.settings.max_waiting

    @property
    def num_sequences(self) -> int:
        return self._admissions.num_sequences

    def resolve_adapter(self, model: str | None) -> str | None:
        """Return the adapter that `model` names, or None. Raises ApiError."""
        if model is None or model in ("", self.settings.model_name):
            return None
        if model in self.engine.adapters:
            return model
        known = ", ".join([self.settings.model_name, *self.engine.adapters])
        raise ApiError(
            404,
            "model_not_found",
            f"model {reprlib.repr(model)} does not exist; use {known}",
            param="model",
        )

    def named_template(self, name: str | None) -> str | None:
        """Return the name. Raises ApiError for the text of a template, which is a program."""
        templates = self.prompt_reader.templates
        if name is not None and name not in templates:
            raise invalid(
                f"chat_template must name a template of this model: {', '.join(templates)}",
                "chat_template",
            )
        return name

    @contextmanager
    def admit(
        self, http: HttpExchange, num_sequences: int, priority: int | None = None
    ) -> Iterator[None]:
        """Count a request as in progress.

        With a priority it may take the place of a waiting request, and may lose its own. Raises
        NotReadyError, or ApiError above a limit of its key.
        """
        if self.draining:
            raise NotReadyError("closed", "")
        if not self.engine.ready:
            raise NotReadyError(self.engine.state, "")
        self._admissions.victims(num_sequences, priority, self.max_sequences)  # it may raise
        key = http.api_key or ""
        max_per_key = self.settings.max_per_key
        if max_per_key and self._requests_by_key[key] >= max_per_key:
            raise ApiError(
                429,
                "rate_limit_exceeded",
                f"this API key already has {max_per_key:,} requests in progress; "
                "send the request again later",
                kind="rate_limit_error",
                retry_after=1,
            )

        with self._admissions.admit(num_sequences, priority, self.max_sequences) as admission:
            http.admission = admission
            self._requests_by_key[key] += 1
            try:
                yield
            finally:
                self._requests_by_key[key] -= 1
                if not self._requests_by_key[key]:
                    del self._requests_by_key[key]

    async def run_in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(None, work)

    async def tokenize(
        self,
        read: Callable[[], TokenizedPrompt],
        param: str,
        max_tokens: int | None = None,
        *,
        max_tokens_field: str = "max_tokens",
        truncation: Truncation = NO_TRUNCATION,
    ) -> list[int]:
        """Run `read` in a thread and return the token ids.

        Raises ApiError if the prompt is invalid or leaves no space for `max_tokens` (None:
        one).
        """
        try:
            ids = list((await self.run_in_thread(read)).token_ids)
        except MessageError as error:
            raise message_error(error) from None
        except RequestError as error:
            if "context" in str(error):
                raise context_exceeded(
                    str(error), self.prompt_reader.max_model_len, param
                ) from None
            raise invalid(str(error), param) from None
        max_model_len = self.prompt_reader.max_model_len
        num_output = 1 if max_tokens is None else max_tokens
        ids = truncation.cut(ids, max_model_len - num_output)
        if len(ids) + num_output > max_model_len:
            field = param if len(ids) >= max_model_len else max_tokens_field
            raise prompt_too_long(len(ids), max_tokens, max_model_len, field)
        return ids

    def _cache_salt(self, http: HttpExchange, salt: str | None) -> str | None:
        if len(self.settings.api_keys) < 2:
            return salt
        key = blake2b((http.api_key or "").encode()).digest()
        return blake2b((salt or "").encode(), key=key, digest_size=16).hexdigest()

    @asynccontextmanager
    async def submit(
        self,
        http: HttpExchange,
        prompts: list[list[int]],
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        pooling: PoolingParams | None = None,
    ) -> AsyncIterator[list[Stream]]:
        """Submit prompts and yield their streams; leaving the context aborts them."""
        options = replace(
            options,
            timeout=self.settings.request_timeout,
            cache_salt=self._cache_salt(http, options.cache_salt),
        )
        if params and params.structured_outputs and params.structured_outputs.dropped:
            http.response_headers[DROPPED_HEADER] = shown_paths(params.structured_outputs.dropped)
        streams: list[Stream] = []
        admission = http.admission
        if admission:
            admission.streams = streams
            admission.check()
        http.stopwatch.submitted()
        record, begun = http.record, time.monotonic()
        record.model = options.adapter or self.settings.model_name
        record.prompt_tokens = sum(map(len, prompts))
        try:
            for index, token_ids in enumerate(prompts):
                seeded = params
                if params and params.seed is None and http.base_seed is not None:
                    seeded = replace(params, seed=derive_seed(http.base_seed, index))
                request = frames.Add(
                    prompt_token_ids=token_ids, params=seeded, pooling=pooling, options=options
                )
                streams.append(await http.while_connected(self.engine.submit(request)))
                if admission:
                    admission.check()
            yield streams
        finally:
            for stream in streams:
                stream.close()
                record.add_stream(stream)
                self.metrics.stream_ended(stream, time.monotonic() - begun)


async def merge_streams(
    streams: list[Stream],
) -> AsyncIterator[tuple[int, frames.StepOutput | frames.Ended]]:
    """Yield events in order of arrival, with the index of their stream."""
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, frames.StepOutput | frames.Ended] | Exception] = asyncio.Queue()

    async def pump(index: int, stream: Stream) -> None:
        try:
            async for event in stream:
                queue.put_nowait((index, event))
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_open -= isinstance(item[1], frames.Ended)
            yield item
    finally:
        for task in tasks:
            task.cancel()


def timeout_error() -> ApiError:
    return ApiError(504, "timeout", "the request took longer than this server allows")


def unsigned_seed(seed: int | None) -> int | None:
    return None if seed is None else seed % 2**64
