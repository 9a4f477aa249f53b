"""The offline face: text in, text out, in the caller's own process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from headrace.config import OFFLINE
from headrace.engine.thread import Inbox
from headrace.errors import RequestError, RequestFailedError
from headrace.face import CHAT_PARAMS, ChatOptions, Face
from headrace.prompts import Message, Prompt, is_conversation
from headrace.request import (
    CheckedRequest,
    Pooling,
    PoolingParams,
    RequestOptions,
    RequestOutput,
    SamplingParams,
    Update,
)


class LLM(Face):
    """A model that continues text and answers conversations.

    `model` is an alias, a path, `hf:...` or `pypi:...`; the options are the fields of
    `EngineConfig`, over the defaults in `config.OFFLINE`. Use it in a `with` block, or call
    `close()`, to give the memory back. Methods may be called from several threads, and interrupted;
    in a process that was forked from the one that made it they raise ClosedError.

    Where no parameters are given a text is continued under those of `SamplingParams()`, which end
    after 16 tokens, and a conversation is answered as in `headrace run`, under
    `config.INTERACTIVE.sampling`, up to the end of the answer.

    `generate`, `chat`, `stream` and `stream_text` take the terms on which a request is served
    beside its parameters. None of them changes a token: `priority` (the lower, the sooner a request
    is served; waiting makes up for it), `timeout` (seconds after which a request ends with what it
    has) and `cache_salt` (only requests of the same salt share KV in the prefix cache). Beside them
    stands `adapter`, the name of a LoRA adapter that `load_adapter` has loaded, for a model that is
    changed by it: requests with different adapters and without any share their steps.
    """

    def __init__(self, model: str | PathLike[str] = "smollm2", **options: Any) -> None:
        super().__init__(model, options, OFFLINE)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | Sequence[float | None] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue each prompt; the results are in the order of the prompts.

        Parameters and terms are one value for all prompts, or a list with one for each. Raises
        RequestError for a prompt, parameters or terms that cannot be served, before anything runs,
        and RequestFailedError, which has all results, when requests failed on the way.
        """
        if not isinstance(prompts, Iterable):
            raise RequestError(
                "prompts must be text, a dictionary or a list of these, not "
                f"{type(prompts).__name__}"
            )
        several = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        requests = self._check_all(
            self._prompts.read_prompt,
            several,
            params,
            priority=priority,
            timeout=timeout,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        return self._run(requests, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | Sequence[float | None] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = False,
        **chat_options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, by the model's chat template, which the
        `chat_options` are for.

        An empty list is one of no conversations. Otherwise as `generate`.
        """
        if not isinstance(messages, Iterable) or isinstance(messages, str | Mapping):
            raise RequestError(
                "messages must be a list of messages, or a list of such lists, not "
                f"{type(messages).__name__}"
            )
        several: list[Any] = [messages] if is_conversation(messages) else list(messages)
        requests = self._check_all(
            partial(self._prompts.read_chat, **chat_options),
            several,
            CHAT_PARAMS if params is None else params,
            priority=priority,
            timeout=timeout,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        return self._run(requests, progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling = "last",
        *,
        normalise: bool = False,
        priority: int | Sequence[int] = 0,
        timeout: float | Sequence[float | None] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = False,
    ) -> NDArray[np.float32]:  # [prompts, dim]
        """A vector for each prompt, in their order, of what the model makes of its tokens: the rows
        behind the model's last norm.

        `pooling` says of which tokens: the `last`, the `mean` of all, or the first (`cls`); with
        `normalise` each vector has a length of 1. The requests share steps with all others, and a
        vector has the same bits whatever those are. With `mean` nothing of the prompt comes from
        the prefix cache, since every row is needed. Raises as `generate` does; a request that its
        timeout ends has failed.
        """
        if not isinstance(prompts, Iterable):
            raise RequestError(
                "prompts must be text, a dictionary or a list of these, not "
                f"{type(prompts).__name__}"
            )
        several = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        requests = self._check_all(
            self._prompts.read_prompt,
            several,
            None,
            priority=priority,
            timeout=timeout,
            cache_salt=cache_salt,
            adapter=adapter,
            pooling=PoolingParams(pooling=pooling, normalise=normalise),
        )
        outputs = self._run(requests, progress)
        vectors = [output.embedding for output in outputs if output.embedding is not None]
        if len(vectors) < len(outputs):
            first = next(i for i, output in enumerate(outputs) if output.embedding is None)
            raise RequestFailedError(f"prompt {first} was not embedded in time", outputs)
        return np.stack(vectors) if vectors else np.zeros((0, self.spec.dim), np.float32)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **chat_options: Unpack[ChatOptions],
    ) -> Iterator[Update]:
        """Continue a prompt, or answer a conversation, update by update: each has the new text,
        token ids and log-probabilities.

        An update is of one of the `n` continuations, and the last one of each has its finish
        reason. The very last update has the whole result, as `generate` returns it. A beam search
        gives its texts in one piece each at the end, since until then another beam may win. Raises
        as `generate` does. Closing the iterator, or letting go of it, ends the request.
        """
        options = RequestOptions(
            priority=priority, timeout=timeout, cache_salt=cache_salt, adapter=adapter
        )
        return self._stream(self._check_one(prompt, params, chat_options, options))

    def stream_text(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **chat_options: Unpack[ChatOptions],
    ) -> Iterator[str]:
        """The text of `stream` alone, piece by piece, for one continuation; the pieces joined are
        the text of its result.
        """
        if params is not None and getattr(params, "n", 1) != 1:
            raise RequestError(
                f"n is {params.n}, and the text of several continuations would be mixed "
                "up: use stream"
            )
        updates = self.stream(
            prompt,
            params,
            priority=priority,
            timeout=timeout,
            cache_salt=cache_salt,
            adapter=adapter,
            **chat_options,
        )
        return (update.text for update in updates if update.text)

    def _run(self, requests: Sequence[CheckedRequest], progress: bool) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        ids = [str(next(self._numbers)) for _ in requests]
        inbox = Inbox()
        try:
            self._thread.add(requests, ids, inbox, only_results=True)
            with _progress(len(ids)) if progress else nullcontext() as advance:
                while len(results) < len(ids):
                    update = inbox.get()
                    if update.result:
                        results[update.request_id] = update.result
                    if advance:
                        advance()
        finally:
            if left := [request_id for request_id in ids if request_id not in results]:
                self._thread.abort(left)
        outputs = [results[request_id] for request_id in ids]
        failed = [(i, output.error) for i, output in enumerate(outputs) if output.error]
        if failed:
            raise RequestFailedError(
                f"{len(failed)} of {len(outputs)} requests failed; prompt {failed[0][0]}: "
                f"{failed[0][1]}",
                outputs,
            )
        return outputs

    def _stream(self, request: CheckedRequest) -> Iterator[Update]:
        request_id, inbox, result = str(next(self._numbers)), Inbox(), None
        try:
            self._thread.add([request], [request_id], inbox)
            while not result:
                update = inbox.get()
                result = update.result
                if result and result.error:
                    raise RequestFailedError(f"the request failed: {result.error}", [result])
                yield update
        finally:
            self._thread.abort([request_id])


@contextmanager
def _progress(count: int) -> Iterator[Callable[[], None]]:
    """A progress bar of finished requests; what it gives advances it by one."""
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        yield partial(bar.advance, bar.add_task("generating", total=count))
