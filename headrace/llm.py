"""The offline face: text in, text out, in the caller's own process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from os import PathLike, fspath
from types import TracebackType
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from headrace.assembly.load import load_model
from headrace.assembly.options import engine_config
from headrace.checkpoint.adapter import read_adapter
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import INTERACTIVE, OFFLINE
from headrace.engine.thread import EngineThread, Inbox
from headrace.errors import RequestError, RequestFailedError
from headrace.model.spec import ModelSpec
from headrace.prompts import Message, Prompt, TokenizedPrompt, is_conversation
from headrace.request import CheckedRequest, Pooling, PoolingParams, RequestOutput, SamplingParams, Update
from headrace.stats import BlockMap, Stats

_T = TypeVar("_T")
_CHAT_PARAMS = SamplingParams(**INTERACTIVE.sampling)


class ChatOptions(TypedDict, total=False):
    """What a chat template can be told beside the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    """Descriptions of functions that the model may ask to be called."""
    documents: Sequence[Mapping[str, Any]] | None
    """Texts that the answer is to be drawn from, with the keys that the template wants: mostly `title` and `text`."""
    add_generation_prompt: bool
    """Whether the text ends with the beginning of an answer (the default), rather than with the last message."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further names for the template, such as `enable_thinking`."""


class LLM:
    """A model that continues text and answers conversations.

    `model` is an alias, a path, `hf:...` or `pypi:...`; the options are the fields of `EngineConfig`, over the defaults in
    `config.OFFLINE`. Use it in a `with` block, or call `close()`, to give the memory back. Methods may be called from several threads,
    and interrupted; in a process that was forked from the one that made it they raise ClosedError.

    Where no parameters are given a text is continued under those of `SamplingParams()`, which end after 16 tokens, and a conversation
    is answered as in `headrace run`, under `config.INTERACTIVE.sampling`, up to the end of the answer.

    `generate`, `chat`, `stream` and `stream_text` take the terms on which a request is served beside its parameters. None of them
    changes a token: `priority` (the lower, the sooner a request is served; waiting makes up for it), `timeout` (seconds after which a
    request ends with what it has) and `cache_salt` (only requests of the same salt share KV in the prefix cache). Beside them stands
    `adapter`, the name of a LoRA adapter that `load_adapter` has loaded, for a model that is changed by it: requests with different
    adapters and without any share their steps.
    """

    def __init__(self, model: str | PathLike[str] = "smollm2", **options: Any) -> None:
        if not isinstance(model, str | PathLike):
            raise RequestError(f"model must be a name or a path, not {type(model).__name__}")
        self._model = model = fspath(model)
        self._engine, self._prompts, self._tokenizer, checkpoint = load_model(model, engine_config(options, OFFLINE))
        self._thread = EngineThread(self._engine)
        self._spec = checkpoint.spec  # and not the rest, which keeps the file open
        self.config = self._engine.config
        self._numbers = count()
        """Ids of requests: chosen here, so that they are known before the engine has the request."""

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

        Parameters and terms are one value for all prompts, or a list with one for each. Raises RequestError for a
        prompt, parameters or terms that cannot be served, before anything runs, and RequestFailedError, which has all results, when
        requests failed on the way.
        """
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts must be text, a dictionary or a list of these, not {type(prompts).__name__}")
        several = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        terms = {"priority": priority, "timeout": timeout, "cache_salt": cache_salt, "adapter": adapter}
        return self._run(self._check(self._prompts.read_prompt, several, params=params, **terms), progress)

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
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, by the model's chat template, which the `options` are for.

        An empty list is one of no conversations. Otherwise as `generate`.
        """
        if not isinstance(messages, Iterable) or isinstance(messages, str | Mapping):
            raise RequestError(f"messages must be a list of messages, or a list of such lists, not {type(messages).__name__}")
        several: list[Any] = [messages] if is_conversation(messages) else list(messages)
        read, params = partial(self._prompts.read_chat, **options), _CHAT_PARAMS if params is None else params
        terms = {"priority": priority, "timeout": timeout, "cache_salt": cache_salt, "adapter": adapter}
        return self._run(self._check(read, several, params=params, **terms), progress)

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
        """A vector for each prompt, in their order, of what the model makes of its tokens: the rows behind the model's last norm.

        `pooling` says of which tokens: the `last`, the `mean` of all, or the first (`cls`); with `normalise` each vector has a length
        of 1. The requests share steps with all others, and a vector has the same bits whatever those are. With `mean` nothing of the
        prompt comes from the prefix cache, since every row is needed. Raises as `generate` does; a request that its timeout ends has
        failed.
        """
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts must be text, a dictionary or a list of these, not {type(prompts).__name__}")
        several = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        terms = {"priority": priority, "timeout": timeout, "cache_salt": cache_salt, "adapter": adapter}
        how = PoolingParams(pooling=pooling, normalise=normalise)
        outputs = self._run(self._check(self._prompts.read_prompt, several, pooling=how, **terms), progress)
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
        **options: Unpack[ChatOptions],
    ) -> Iterator[Update]:
        """Continue a prompt, or answer a conversation, update by update: each has the new text, token ids and log-probabilities.

        An update is of one of the `n` continuations, and the last one of each has its finish reason. The very last update has the
        whole result, as `generate` returns it. A beam search gives its texts in one piece each at the end, since until then another
        beam may win. Raises as `generate` does. Closing the iterator, or letting go of it, ends the request.
        """
        terms = {"priority": priority, "timeout": timeout, "cache_salt": cache_salt, "adapter": adapter}
        read: Callable[[Any], TokenizedPrompt] = self._prompts.read_prompt
        if not isinstance(prompt, str | Mapping):
            read, params = partial(self._prompts.read_chat, **options), _CHAT_PARAMS if params is None else params
        elif options:
            raise RequestError(f"{', '.join(options)} belongs to a conversation, and the prompt is none")
        (request,) = self._check(read, [prompt], params=params, **terms)
        return self._stream(request)

    def stream_text(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[str]:
        """The text of `stream` alone, piece by piece, for one continuation; the pieces joined are the text of its result."""
        if params is not None and getattr(params, "n", 1) != 1:
            raise RequestError(f"n is {params.n}, and the text of several continuations would be mixed up: use stream")
        terms: dict[str, Any] = {"priority": priority, "timeout": timeout, "cache_salt": cache_salt, "adapter": adapter}
        updates = self.stream(prompt, params, **terms, **options)
        return (update.text for update in updates if update.text)

    def apply_chat_template(
        self, messages: Sequence[Message], *, tokenize: bool = True, add_generation_prompt: bool = False, **options: Any
    ) -> str | list[int]:
        """The prompt that a conversation makes, by the model's chat template: token ids or, without `tokenize`, text.

        Arguments and defaults mean what they do in Hugging Face transformers; `options` are the other ones of `ChatOptions`. Special
        tokens are in the text, so give the token ids to `generate`, or the conversation itself to `chat`. Raises as `chat` does.
        """
        read = self._prompts.read_chat(messages, add_generation_prompt=add_generation_prompt, **options)
        return list(read.token_ids) if tokenize else read.text or ""

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def spec(self) -> ModelSpec:
        """Shape and constants of the model."""
        return self._spec

    def load_adapter(self, name: str, adapter: str | PathLike[str]) -> None:
        """Load a LoRA adapter under a name, for requests that ask for it: a folder as PEFT saves it, or `hf:...`.

        It goes with weights in any format, and is kept in bf16 beside them. Raises RequestError for a name that is taken, ModelError for
        an adapter that is missing, malformed, of another model or of a kind that is not known.
        """
        if not isinstance(name, str) or not name:
            raise RequestError(f"the name of an adapter is a text that is not empty, not {name!r}")
        matrices = read_adapter(resolve(fspath(adapter)), self._spec)
        self._thread.call(lambda: self._engine.load_adapter(name, matrices))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter and give its memory back; requests under way keep it to their end. Raises RequestError for an unknown name."""
        self._thread.call(lambda: self._engine.unload_adapter(name))

    def stats(self) -> Stats:
        """What the engine does now, and what it has done. Raises ClosedError once it is closed."""
        return self._thread.call(self._engine.stats)

    def block_map(self) -> BlockMap:
        """Which request holds which block of KV now; `headrace.planner.block_picture.block_map_svg` draws it."""
        return self._thread.call(self._engine.block_map)

    def close(self) -> None:
        """End all requests and give the memory back; threads that wait for a result get a ClosedError. May be called more than once."""
        self._thread.close()
        self._prompts.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        spec, limits = self.spec, self._engine.limits
        shape = f"{spec.architecture}, {spec.num_layers} layers of width {spec.dim}, vocabulary {spec.vocab_size:,}"
        kv = f"KV for {max(limits.kv.num_blocks) * limits.kv.block_size:,} tokens in {limits.kv.dtype}"
        lossy = f"; lossy: {self.config.lossy}" if self.config.lossy else ""
        state = "closed" if self._thread.closed else f"backend {self.config.backend}, context {limits.max_model_len:,}, {kv}{lossy}"
        return f"LLM({self._model!r}: {shape}; {state})"

    def _check(self, read: Callable[[_T], TokenizedPrompt], prompts: Sequence[_T], **asked: object) -> list[CheckedRequest]:
        """The requests that these prompts make; `asked` are arguments of `Engine.check`, one for all or one for each. Queues nothing."""
        self._thread.check_open()
        columns = {name: _one_each(name, given, len(prompts)) for name, given in asked.items()}
        requests = []
        for i, prompt in enumerate(prompts):
            token_ids, text = read(prompt)
            requests.append(self._engine.check(token_ids, prompt=text, **{name: column[i] for name, column in columns.items()}))
        return requests

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
            raise RequestFailedError(f"{len(failed)} of {len(outputs)} requests failed; prompt {failed[0][0]}: {failed[0][1]}", outputs)
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


def _one_each(name: str, given: object, count: int) -> Sequence[Any]:
    """One value for each of `count` prompts: `given` is a list of these, or one value for all."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{name} has {len(given):,} entries and there are {count:,} prompts: give one value for all, or one for each")
    return given


@contextmanager
def _progress(count: int) -> Iterator[Callable[[], None]]:
    """A progress bar of finished requests; what it gives advances it by one."""
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        yield partial(bar.advance, bar.add_task("generating", total=count))
