"""The offline face: text in, text out, in the caller's own process."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from os import PathLike, fspath
from threading import RLock
from types import TracebackType
from typing import Any, TypeVar

from headrace.assembly.load import load_model
from headrace.assembly.options import engine_config
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import OFFLINE
from headrace.errors import ClosedError, RequestError, RequestFailedError
from headrace.model.spec import ModelSpec
from headrace.prompts import Message, Prompt, TokenizedPrompt, is_conversation
from headrace.request import CheckedRequest, RequestOutput, SamplingParams, Update
from headrace.stats import BlockMap, Stats

_T = TypeVar("_T")


class LLM:
    """A model that continues text.

    `model` is an alias, a path, `hf:...` or `pypi:...`; the options are the fields of `EngineConfig`, over the defaults in
    `config.OFFLINE`. Use it in a `with` block, or call `close()`, to give the memory back. Methods may be called from several threads.

    `generate`, `chat` and `stream` take the terms on which a request is served beside its parameters. None of them changes a token:
    `priority` (the lower, the sooner a request is served; waiting makes up for it), `timeout` (seconds after which a request ends
    with what it has) and `cache_salt` (only requests of the same salt share KV in the prefix cache).
    """

    def __init__(self, model: str | PathLike[str] = "smollm2", **options: Any) -> None:
        if not isinstance(model, str | PathLike):
            raise RequestError(f"model must be a name or a path, not {type(model).__name__}")
        self._model = model = fspath(model)
        self._engine, self._prompts, self._tokenizer, checkpoint = load_model(model, engine_config(options, OFFLINE))
        self._spec = checkpoint.spec  # and not the rest, which keeps the file open
        self.config = self._engine.config
        self._inboxes: dict[str, deque[Update]] = {}
        """Where the updates of each request go; the requests of one call have one inbox together."""
        self._numbers = count()
        """Ids of requests: chosen here, so that they are known before the engine has the request."""
        self._lock = RLock()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | Sequence[float | None] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue each prompt; the results are in the order of the prompts.

        Parameters and terms are one value for all prompts, or a list with one for each. Raises RequestError for a
        prompt, parameters or terms that cannot be served, before anything runs, and RequestFailedError, which has all results, when
        requests failed on the way.
        """
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts must be text, a dictionary or a list of these, not {type(prompts).__name__}")
        several = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        read, terms = self._prompts.read_prompt, {"priority": priority, "timeout": timeout, "cache_salt": cache_salt}
        return self._run(self._check(read, several, params=params, **terms), progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        timeout: float | Sequence[float | None] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        progress: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, by the model's chat template, which the last three arguments are for.

        An empty list is one of no conversations. Otherwise as `generate`.
        """
        if not isinstance(messages, Iterable) or isinstance(messages, str | Mapping):
            raise RequestError(f"messages must be a list of messages, or a list of such lists, not {type(messages).__name__}")
        several: list[Any] = [messages] if is_conversation(messages) else list(messages)
        read = partial(
            self._prompts.read_chat,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        terms = {"priority": priority, "timeout": timeout, "cache_salt": cache_salt}
        return self._run(self._check(read, several, params=params, **terms), progress)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
    ) -> Iterator[str]:
        """The continuation of a prompt, or the answer to a conversation, piece by piece; the pieces joined are its text.

        A beam search gives its text in one piece at the end, since until then another beam may win.
        Raises as `generate` does. Closing the iterator, or letting go of it, ends the request.
        """
        terms = {"priority": priority, "timeout": timeout, "cache_salt": cache_salt}
        (request,) = self._check(self._prompts.read, [prompt], params=params, **terms)
        if request.params.n != 1:
            raise RequestError(f"a stream has one continuation, and n is {request.params.n}")
        return self._stream(request)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def spec(self) -> ModelSpec:
        """Shape and constants of the model."""
        return self._spec

    def stats(self) -> Stats:
        """What the engine does now, and what it has done."""
        with self._lock:
            return self._engine.stats()

    def block_map(self) -> BlockMap:
        """Which request holds which block of KV now; `headrace.planner.block_picture.block_map_svg` draws it."""
        with self._lock:
            return self._engine.block_map()

    def close(self) -> None:
        """End all requests and give the memory back. May be called more than once."""
        with self._lock:
            self._closed = True
            self._engine.close()
        self._prompts.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        spec, limits = self.spec, self._engine.limits
        shape = f"{spec.architecture}, {spec.num_layers} layers of width {spec.dim}, vocabulary {spec.vocab_size:,}"
        kv = f"KV for {max(limits.kv.num_blocks) * limits.kv.block_size:,} tokens in {limits.kv.dtype}"
        state = "closed" if self._closed else f"backend {self.config.backend}, context {limits.max_model_len:,}, {kv}"
        return f"LLM({self._model!r}: {shape}; {state})"

    def _check(self, read: Callable[[_T], TokenizedPrompt], prompts: Sequence[_T], **asked: object) -> list[CheckedRequest]:
        """The requests that these prompts make; `asked` are arguments of `Engine.check`, one for all or one for each. Queues nothing."""
        if self._closed:
            raise ClosedError("this LLM is closed")
        columns = {name: _one_each(name, given, len(prompts)) for name, given in asked.items()}
        requests = []
        for i, prompt in enumerate(prompts):
            token_ids, text = read(prompt)
            requests.append(self._engine.check(token_ids, prompt=text, **{name: column[i] for name, column in columns.items()}))
        return requests

    def _run(self, requests: Sequence[CheckedRequest], progress: bool) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        inbox: deque[Update] = deque()
        ids = [str(next(self._numbers)) for _ in requests]
        try:
            for request_id, request in zip(ids, requests, strict=True):
                self._add(request, request_id, inbox)
            updates = self._updates(inbox, len(ids))
            for update in _shown(updates, len(ids)) if progress else updates:
                if update.result:
                    results[update.request_id] = update.result
        finally:
            self._forget(ids)
        outputs = [results[request_id] for request_id in ids]
        failed = [(i, output.error) for i, output in enumerate(outputs) if output.error]
        if failed:
            raise RequestFailedError(f"{len(failed)} of {len(outputs)} requests failed; prompt {failed[0][0]}: {failed[0][1]}", outputs)
        return outputs

    def _stream(self, request: CheckedRequest) -> Iterator[str]:
        inbox: deque[Update] = deque()
        request_id = str(next(self._numbers))
        try:
            self._add(request, request_id, inbox)
            for update in self._updates(inbox, 1):
                if update.text:
                    yield update.text
                if update.result and update.result.error:
                    raise RequestFailedError(f"the request failed: {update.result.error}", [update.result])
        finally:
            self._forget([request_id])

    def _add(self, request: CheckedRequest, request_id: str, inbox: deque[Update]) -> None:
        """Queue a request; the caller forgets it, also where this was interrupted half way."""
        with self._lock:
            self._inboxes[request_id] = inbox
            self._engine.add(request, request_id)

    def _updates(self, inbox: deque[Update], num_requests: int) -> Iterator[Update]:
        """All updates of the requests of an inbox. Steps the engine when it is empty; other requests' updates go to their inboxes."""
        while num_requests:
            with self._lock:
                if not inbox:
                    for update in self._engine.step():
                        self._inboxes[update.request_id].append(update)
            while inbox:  # another thread may append to it at any time
                update = inbox.popleft()
                num_requests -= update.result is not None
                yield update

    def _forget(self, ids: Iterable[str]) -> None:
        with self._lock:
            for request_id in ids:
                self._engine.abort(request_id)
                self._inboxes.pop(request_id, None)


def _one_each(name: str, given: object, count: int) -> Sequence[Any]:
    """One value for each of `count` prompts: `given` is a list of these, or one value for all."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{name} has {len(given):,} entries and there are {count:,} prompts: give one value for all, or one for each")
    return given


def _shown(updates: Iterator[Update], count: int) -> Iterator[Update]:
    """The same updates, with a progress bar of finished requests beside them."""
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("generating", total=count)
        for update in updates:
            bar.advance(task, bool(update.result))
            yield update
