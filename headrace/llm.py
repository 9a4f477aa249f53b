"""The offline face: text in, text out, in the caller's own process."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from itertools import chain
from threading import RLock
from types import TracebackType
from typing import Any, NamedTuple, TypeGuard, TypeVar, get_args

from headrace.backend import BACKENDS, compile_program
from headrace.checkpoint.chat import render_chat
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import AcceptanceMethod, EngineConfig, KvConfig, KvDtype
from headrace.drafts import compile_draft_models, open_draft_checkpoints, target_program
from headrace.engine.engine import SCHEDULERS, Engine, EngineLimits
from headrace.errors import ClosedError, MemoryLimitError, RequestError, RequestFailedError
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.planner.host import available_memory, usable_cores
from headrace.program.kv import KvGroup
from headrace.propose import PROPOSERS, check_speculation, make_proposers
from headrace.propose.draft_model import max_rows
from headrace.request import RequestOutput, SamplingParams, Service, Update, check_names, integer, number
from headrace.stats import BlockMap, Stats

Prompt = str | Mapping[str, Any]
"""Text, or `{"prompt": text}`, or `{"prompt_token_ids": [...]}`."""
Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`"""

_T = TypeVar("_T")
_CHOICES = {
    "backend": BACKENDS,
    "kv_dtype": get_args(KvDtype),
    "proposer": PROPOSERS,
    "acceptance_method": get_args(AcceptanceMethod),
    "batching": tuple(SCHEDULERS),
}
MULTI_STEP_MS = 50.0
"""Of `LLM`: whole results come soonest so, and a text that is shown as it comes still flows."""
_FLAGS = ("adaptive_speculation", "prefix_cache")
_MOST_BLOCKS = 2**26
_BOUNDS = {  # option: least, most
    "threads": (0, 1024),
    "kv_blocks": (0, _MOST_BLOCKS),
    "max_model_len": (0, 2**26),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**20),
    "chunked_prefill_size": (1, 2**20),
    "max_logit_rows": (1, 2**20),
    "max_draft_tokens": (1, 2**10),
    "draft_layers": (0, 4096),
    "draft_depth": (1, 64),
    "draft_width": (1, 16),
    "seed": (0, 2**64 - 1),
}


class Loaded(NamedTuple):
    """A model, ready to run."""

    engine: Engine
    tokenizer: Tokenizer
    checkpoint: Checkpoint


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The configuration with these fields set. Raises RequestError for an unknown field or a value out of range."""
    check_names("option", options, (field.name for field in fields(EngineConfig)))
    checked = dict(options)
    for name in options.keys() & _BOUNDS.keys():
        checked[name] = integer(name, options[name], *_BOUNDS[name])
    for name in options.keys() & {"target_token_ms", "multi_step_ms"}:
        checked[name] = number(name, options[name], 0.0, 1e6)
    for name in options.keys() & _CHOICES.keys():
        if options[name] not in _CHOICES[name]:
            raise RequestError(f"{name} must be one of {', '.join(_CHOICES[name])}, not {options[name]!r}")
    for name in options.keys() & set(_FLAGS):
        if not isinstance(options[name], bool):
            raise RequestError(f"{name} must be true or false, not {options[name]!r}")
    config = EngineConfig(**checked)
    check_speculation(config)
    return config


def load_engine(model: str, config: EngineConfig) -> Loaded:
    """Find a model, download it if need be, and make an engine of it.

    Raises ModelError (missing, malformed, unknown), RequestError (an option the model cannot have) or MemoryLimitError.
    """
    checkpoint = open_checkpoint(resolve(model))
    spec = checkpoint.spec
    if config.max_model_len > spec.max_context:
        raise RequestError(f"max_model_len is {config.max_model_len:,}, and the model's context ends at {spec.max_context:,}")
    max_model_len = config.max_model_len or spec.max_context
    tokenizer = checkpoint.load_tokenizer()
    draft_checkpoints = open_draft_checkpoints(config, checkpoint, tokenizer)
    weights = sum(tensor.nbytes for tensor in checkpoint.tensors.values()) + draft_checkpoints.nbytes
    program = target_program(config, checkpoint)
    models = [KvUse(program.kv_groups, config.max_num_batched_tokens)]
    if draft := draft_checkpoints.draft:
        models.append(KvUse(trace_model(draft.spec, draft.tensors).kv_groups, max_rows(config.draft_depth)))
    kv, *draft_kv = size_kv(models, config, max_model_len, weights, available_memory())
    threads = config.threads or usable_cores()
    executable = compile_program(config.backend, program, checkpoint.tensors, kv, threads)
    draft_models = compile_draft_models(config, draft_checkpoints, checkpoint, executable, draft_kv[0] if draft_kv else None)
    limits = EngineLimits(spec.vocab_size, max_model_len, kv, program.kv_groups, program.attention_crossover)
    config = replace(config, threads=threads)
    engine = Engine(executable, tokenizer, limits, config, make_proposers(config, draft_models), name=model)
    return Loaded(engine, tokenizer, checkpoint)


class KvUse(NamedTuple):
    """What a model keeps, and most rows that a sequence has in a step of it."""

    groups: tuple[KvGroup, ...]
    max_rows: int


def size_kv(models: Sequence[KvUse], config: EngineConfig, max_model_len: int, weights: int, available: int) -> list[KvConfig]:
    """The KV of a model, and of a draft that keeps its own beside it, by bytes of weights and bytes of available memory.

    The layers that see furthest have as many blocks as asked for, else room for `max_num_seqs` sequences of full length. Where layers see
    less far a sequence needs as many blocks at most, and no more than its window touches: they have enough for all sequences. What is
    not asked for takes no more than half of what the weights leave, unless one sequence needs more, and where that is so there are
    windows for fewer sequences. Raises MemoryLimitError, with the arithmetic.
    """
    block_size = KvConfig.block_size
    for_one = [[group.num_blocks(max_model_len, model.max_rows, block_size) for group in model.groups] for model in models]
    widest = max(map(max, for_one))

    def num_blocks(blocks: int, seqs: int) -> list[tuple[int, ...]]:
        return [tuple(blocks if one == widest else min(blocks, seqs * one) for one in each) for each in for_one]

    def num_bytes(blocks: int, seqs: int) -> int:
        pairs = zip((group for model in models for group in model.groups), chain.from_iterable(num_blocks(blocks, seqs)), strict=True)
        return sum(count * group.block_bytes(config.kv_dtype, block_size) for group, count in pairs)

    blocks, seqs, memory = config.kv_blocks, config.max_num_seqs, available - weights
    if not blocks:
        in_half = bisect_right(range(1, _MOST_BLOCKS), memory // 2, key=lambda n: num_bytes(n, seqs))
        blocks = max(widest, min(seqs * widest, in_half))
        seqs = max(1, bisect_right(range(1, seqs + 1), memory // 2, key=lambda n: num_bytes(blocks, n)))
    fitting = bisect_right(range(1, _MOST_BLOCKS), memory, key=lambda n: num_bytes(n, seqs))
    if blocks <= fitting:
        return [KvConfig(counts, block_size, config.kv_dtype) for counts in num_blocks(blocks, seqs)]
    tokens, kv = blocks * block_size, num_bytes(blocks, seqs)
    advice = f"kv_blocks may be {fitting:,}" if config.kv_blocks else f"set max_model_len to {fitting * block_size:,} or less"
    raise MemoryLimitError(
        f"{weights:,} bytes of weights and {kv:,} bytes of KV for {tokens:,} tokens are {weights + kv:,} bytes, "
        f"and {available:,} are available: {advice if fitting else 'the model is too large for this machine'}"
    )


class _Prepared(NamedTuple):
    """A request that the engine can serve."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    service: Service | None = None


class LLM:
    """A model that continues text.

    `model` is an alias, a path, `hf:...` or `pypi:...`; the options are the fields of `EngineConfig`. Use it in a `with`
    block, or call `close()`, to give the memory back. Methods may be called from several threads.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self.config = engine_config(options)
        if (
            "chunked_prefill_size" not in options
        ):  # whole results come soonest with large chunks, and nobody watches the time between two tokens
            self.config = replace(self.config, chunked_prefill_size=self.config.max_num_batched_tokens)
        if "multi_step_ms" not in options:
            self.config = replace(self.config, multi_step_ms=MULTI_STEP_MS)
        self._model = model
        self._engine, self._tokenizer, self._checkpoint = load_engine(model, self.config)
        self._inboxes: dict[str, list[Update]] = {}
        self._lock = RLock()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service: Service | Sequence[Service] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue each prompt; the results are in the order of the prompts. `params` and `service` are for all, or one for each.

        Raises RequestError for a prompt or parameters that cannot be served, before anything runs, and RequestFailedError,
        which has all results, when requests failed on the way.
        """
        self._check_open()
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts must be text, a dictionary or a list of these, not {type(prompts).__name__}")
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        several = _one_each(SamplingParams, params, len(prompts))
        prepared = [self._prepare(p, q) for p, q in zip(prompts, several, strict=True)]
        return self._run(prepared, service, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service: Service | Sequence[Service] | None = None,
        progress: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, by the model's chat template. Raises as `generate` does."""
        self._check_open()
        conversations: list[object] = [messages] if _is_conversation(messages) else list(messages)
        several = _one_each(SamplingParams, params, len(conversations))
        prepared = [self._prepare_chat(c, p, template_options) for c, p in zip(conversations, several, strict=True)]
        return self._run(prepared, service, progress)

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, *, service: Service | None = None
    ) -> Iterator[str]:
        """The continuation of a prompt, or the answer to a conversation, piece by piece; the pieces joined are its text.

        A beam search gives its text in one piece at the end, since until then another beam may win.
        Raises as `generate` does. Closing the iterator, or letting go of it, ends the request.
        """
        self._check_open()
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"a stream has one continuation, and n is {params.n}")
        prepared = self._prepare(prompt, params) if isinstance(prompt, str | Mapping) else self._prepare_chat(prompt, params, {})
        return self._stream(prepared._replace(service=service))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def spec(self) -> ModelSpec:
        """Shape and constants of the model."""
        return self._checkpoint.spec

    def stats(self) -> Stats:
        """What the engine does now, and what it has done."""
        with self._lock:
            return self._engine.stats()

    def block_map(self) -> BlockMap:
        """Who holds which block of KV now; `headrace.planner.block_picture.block_map_svg` draws it."""
        with self._lock:
            return self._engine.block_map()

    def close(self) -> None:
        """End all requests and give the memory back. May be called more than once."""
        with self._lock:
            self._closed = True
            self._engine.close()

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

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> _Prepared:
        if isinstance(prompt, str):
            return self._prepare_text(prompt, params)
        if not isinstance(prompt, Mapping):
            raise RequestError(f"a prompt must be text or a dictionary, not {type(prompt).__name__}")
        check_names("key of a prompt", prompt, ("prompt", "prompt_token_ids"))
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"a prompt must be text, not {type(text).__name__}")
        if "prompt_token_ids" in prompt:
            return _Prepared(text, self._engine.check(prompt["prompt_token_ids"], params), params)
        return self._prepare_text(text or "", params)

    def _prepare_text(self, text: str, params: SamplingParams, *, rendered: bool = False) -> _Prepared:
        longest = self._engine.limits.max_model_len
        size = len(text.encode(errors="surrogatepass"))
        if not size:
            raise RequestError("the prompt is empty")
        # Tokenising takes time that grows with the text: what cannot fit is refused before.
        if size > longest and size > longest * self._longest_token:
            raise RequestError(f"the prompt has {size:,} bytes, more than a context of {longest:,} tokens can hold")
        ids = self._tokenizer.encode(text, add_special=not rendered, parse_special=rendered)
        return _Prepared(text, self._engine.check(ids, params), params)

    def _prepare_chat(self, messages: object, params: SamplingParams, options: Mapping[str, Any]) -> _Prepared:
        template = self._checkpoint.chat_template
        if template is None:
            raise RequestError(f"{self._model} has no chat template: use generate")
        if not _is_conversation(messages):
            raise RequestError("a conversation must be a list of messages, each with a role and content")
        text = render_chat(template, messages, bos=self._tokenizer.bos_token, eos=self._tokenizer.eos_token, **options)
        return self._prepare_text(text, params, rendered=True)

    @cached_property
    def _longest_token(self) -> int:
        return max(len(self._tokenizer.token_bytes(token)) for token in range(self._tokenizer.vocab_size))

    def _run(self, prepared: list[_Prepared], service: Service | Sequence[Service] | None, progress: bool) -> list[RequestOutput]:
        services = _one_each(Service, service, len(prepared))
        prepared = [request._replace(service=each) for request, each in zip(prepared, services, strict=True)]
        results: dict[str, RequestOutput] = {}
        ids: list[str] = []
        try:
            ids += [self._add(request) for request in prepared]
            for update in _shown(self._updates(ids), len(ids)) if progress else self._updates(ids):
                if update.result:
                    results[update.request_id] = update.result
        finally:
            self._forget(ids)
        outputs = [results[request_id] for request_id in ids]
        failed = [(i, output.error) for i, output in enumerate(outputs) if output.error]
        if failed:
            raise RequestFailedError(f"{len(failed)} of {len(outputs)} requests failed; prompt {failed[0][0]}: {failed[0][1]}", outputs)
        return outputs

    def _stream(self, request: _Prepared) -> Iterator[str]:
        request_id = self._add(request)
        try:
            for update in self._updates([request_id]):
                if update.text:
                    yield update.text
                if update.result and update.result.error:
                    raise RequestFailedError(f"the request failed: {update.result.error}", [update.result])
        finally:
            self._forget([request_id])

    def _add(self, request: _Prepared) -> str:
        with self._lock:
            request_id = self._engine.add_request(request.token_ids, request.params, prompt=request.text, service=request.service)
            self._inboxes[request_id] = []
            return request_id

    def _updates(self, ids: Sequence[str]) -> Iterator[Update]:
        """Everything that becomes of these requests. Steps the engine; what comes for other requests goes to their inboxes."""
        pending = set(ids)
        while pending:
            with self._lock:
                if not any(self._inboxes[request_id] for request_id in pending):
                    for update in self._engine.step():
                        self._inboxes[update.request_id].append(update)
                updates = [self._inboxes[request_id].pop(0) for request_id in ids if self._inboxes[request_id]]
            for update in updates:
                if update.result:
                    pending.discard(update.request_id)
                yield update

    def _forget(self, ids: Sequence[str]) -> None:
        with self._lock:
            for request_id in ids:
                self._engine.abort(request_id)
                self._inboxes.pop(request_id, None)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this LLM is closed")


def _one_each(kind: type[_T], given: _T | Sequence[_T] | None, count: int) -> list[_T]:
    if given is None or isinstance(given, kind):
        return [kind() if given is None else given] * count
    assert isinstance(given, Sequence)
    if len(given) != count:
        raise RequestError(f"there are {count:,} prompts and {len(given):,} {kind.__name__}")
    return list(given)


def _is_conversation(messages: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(messages, Sequence) and bool(messages) and all(isinstance(message, Mapping) for message in messages)


def _shown(updates: Iterator[Update], count: int) -> Iterator[Update]:
    """The same updates, with a progress bar of finished requests beside them."""
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("generating", total=count)
        for update in updates:
            bar.advance(task, bool(update.result))
            yield update
