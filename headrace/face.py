"""What `LLM` and `AsyncLLM` have in common: a loaded model, its thread, and all that is asked of
these but answers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from os import PathLike, fspath
from typing import Any, TypedDict, TypeVar

from headrace.checkpoint.adapter import read_adapter
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import INTERACTIVE, FaceDefaults
from headrace.engine.thread import EngineThread
from headrace.errors import RequestError
from headrace.loader.load import load_model
from headrace.loader.options import engine_config
from headrace.model.spec import ModelSpec
from headrace.prompts import Message, Prompt, TokenizedPrompt
from headrace.request import CheckedRequest, PoolingParams, RequestOptions, SamplingParams
from headrace.stats import BlockMap, Stats

_T = TypeVar("_T")
CHAT_PARAMS = SamplingParams(**INTERACTIVE.sampling)
"""Of a conversation, where none are given."""


class ChatOptions(TypedDict, total=False):
    """What a chat template can be told beside the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    """Descriptions of functions that the model may ask to be called."""
    documents: Sequence[Mapping[str, Any]] | None
    """Texts that the answer is to be drawn from, with the keys that the template wants: mostly
    `title` and `text`.
    """
    add_generation_prompt: bool
    """Whether the text ends with the beginning of an answer (the default), rather than with the
    last message.
    """
    continue_final_message: bool
    """Whether the answer goes on with the last message, which is then the beginning of it."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further names for the template, such as `enable_thinking`."""


class Face:
    """A model that is ready to be asked."""

    def __init__(
        self, model: str | PathLike[str], options: Mapping[str, Any], defaults: FaceDefaults
    ) -> None:
        if not isinstance(model, str | PathLike):
            raise RequestError(f"model must be a name or a path, not {type(model).__name__}")
        self._model = model = fspath(model)
        self._engine, self._prompts, self._tokenizer, checkpoint = load_model(
            model, engine_config(options, defaults)
        )
        self._thread = EngineThread(self._engine)
        self._spec = checkpoint.spec  # and not the rest, which keeps the file open
        self.config = self._engine.config
        self._numbers = count()
        """Ids of requests: chosen here, so that they are known before the engine has the request.
        """

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str | list[int]:
        """The prompt that a conversation makes, by the model's chat template: token ids or, without
        `tokenize`, text.

        Arguments and defaults mean what they do in Hugging Face transformers; `options` are the
        other ones of `ChatOptions`. Special tokens are in the text, so give the token ids to
        `generate`, or the conversation itself to `chat`. Raises as `chat` does.
        """
        read = self._prompts.read_chat(
            messages, add_generation_prompt=add_generation_prompt, **options
        )
        return list(read.token_ids) if tokenize else read.text or ""

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def spec(self) -> ModelSpec:
        """Shape and constants of the model."""
        return self._spec

    def load_adapter(self, name: str, adapter: str | PathLike[str]) -> None:
        """Load a LoRA adapter under a name, for requests that ask for it: a folder as PEFT saves
        it, or `hf:...`.

        It goes with weights in any format, and is kept in bf16 beside them. Raises RequestError for
        a name that is taken, ModelError for an adapter that is missing, malformed, of another model
        or of a kind that is not known.
        """
        if not isinstance(name, str) or not name:
            raise RequestError(f"the name of an adapter is a text that is not empty, not {name!r}")
        matrices = read_adapter(resolve(fspath(adapter)), self._spec)
        self._thread.call(lambda: self._engine.load_adapter(name, matrices))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter and give its memory back; requests under way keep it to their end.
        Raises RequestError for an unknown name.
        """
        self._thread.call(lambda: self._engine.unload_adapter(name))

    def stats(self) -> Stats:
        """What the engine does now, and what it has done. Raises ClosedError once it is closed."""
        return self._thread.call(self._engine.stats)

    def block_map(self) -> BlockMap:
        """Which request holds which block of KV now; `headrace.planner.block_picture.block_map_svg`
        draws it.
        """
        return self._thread.call(self._engine.block_map)

    def close(self) -> None:
        """End all requests and give the memory back; threads that wait for a result get a
        ClosedError. May be called more than once.
        """
        self._thread.close()
        self._prompts.close()

    def __repr__(self) -> str:
        spec, limits = self.spec, self._engine.limits
        shape = (
            f"{spec.architecture}, {spec.num_layers} layers of width {spec.dim}, vocabulary "
            f"{spec.vocab_size:,}"
        )
        kv = (
            f"KV for {max(limits.kv.num_blocks) * limits.kv.block_size:,} tokens in "
            f"{limits.kv.dtype}"
        )
        lossy = f"; lossy: {self.config.lossy}" if self.config.lossy else ""
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
        chat_options: ChatOptions,
        options: RequestOptions,
        pooling: PoolingParams | None = None,
    ) -> CheckedRequest:
        """Read and check one prompt or conversation, without queueing it."""
        self._thread.check_open()
        read: Callable[[Any], TokenizedPrompt] = self._prompts.read_prompt
        if not isinstance(prompt, str | Mapping):
            read = partial(self._prompts.read_chat, **chat_options)
            params = CHAT_PARAMS if params is None else params
        elif chat_options:
            raise RequestError(
                f"{', '.join(chat_options)} belongs to a conversation, and the prompt is none"
            )
        token_ids, text = read(prompt)
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

        Parameters and options are one value for all prompts, or a list with one per prompt.
        """
        self._thread.check_open()
        count = len(prompts)
        columns = zip(
            prompts,
            _one_per_prompt("params", params, count),
            _one_per_prompt("priority", priority, count),
            _one_per_prompt("timeout", timeout, count),
            _one_per_prompt("cache_salt", cache_salt, count),
            _one_per_prompt("adapter", adapter, count),
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


def _one_per_prompt(name: str, value: object, count: int) -> Sequence[Any]:
    """Return `count` values: `value` itself if it is a list of them, else `value` repeated."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{name} has {len(value):,} entries and there are {count:,} prompts: give one "
            "value for all, or one for each"
        )
    return value
