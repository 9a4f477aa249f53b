"""An engine that handles commands and puts events, over any transport."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace.checkpoint.source import resolve
from headrace.engine.engine import Engine
from headrace.engine.thread import EngineThread
from headrace.errors import (
    ClosedError,
    HeadraceError,
    MemoryLimitError,
    NonFiniteLogitsError,
    RankFailedError,
    RankLostError,
    RequestError,
)
from headrace.loader.load import load_engine, open_model
from headrace.model.spec import ModelSpec
from headrace.outputs import RequestOutput, Update
from headrace.remote import frames
from headrace.stats import STEP_KINDS, BlockMap, Holding, Stats, StepTotals

if TYPE_CHECKING:
    from headrace.parallel.launch import Launcher

Put = Callable[[frames.Event], None]
"""Takes an event in any thread, without blocking or exceptions."""

_KV_FIGURES = (
    "blocks_total",
    "blocks_free",
    "blocks_cached",
    "kv_bytes",
    "kv_bytes_used",
    "occupancy",
    "waste",
)


class OpenedEngine(NamedTuple):
    engine: Engine
    spec: ModelSpec
    adapters: dict[str, str]
    """Digests of the loaded adapters, by name."""


def open_engine(setup: frames.Setup, launcher: "Launcher | None" = None) -> OpenedEngine:
    """Load an engine with its adapters. Raises as `load_model`."""
    checkpoint = open_model(setup.model, setup.config)
    load_tokenizer = cache(checkpoint.load_tokenizer)
    engine = load_engine(setup.model, setup.config, checkpoint, load_tokenizer, launcher)
    digests = {}
    for name, path in setup.adapters.items():
        adapter, digests[name] = _read_adapter(path, checkpoint.spec)
        engine.load_adapter(name, adapter)
    return OpenedEngine(engine, checkpoint.spec, digests)


def _read_adapter(path: str, spec: ModelSpec) -> tuple[Mapping[str, Any], str]:
    """Read an adapter, and its digest. Most engines have none, so the readers load only here."""
    from headrace.checkpoint.adapter import read_adapter
    from headrace.checkpoint.adapter_digest import adapter_digest

    adapter = read_adapter(resolve(path), spec)
    return adapter, adapter_digest(adapter)


class _RequestSink:
    def __init__(self, request_id: str, put: Put) -> None:
        self._id = request_id
        self._put = put

    def put(self, item: Update | BaseException, /) -> None:
        try:
            if not isinstance(item, BaseException):
                self._put_update(item)
                return
        except Exception as error:
            item = error
        self._put(frames.Ended(id=self._id, error=refused_event(self._id, item)))

    def _put_update(self, update: Update) -> None:
        if update.token_ids or update.text or update.finish_reason:
            self._put(
                frames.StepOutput(
                    id=self._id,
                    index=update.index,
                    text=update.text,
                    token_ids=update.token_ids,
                    logprobs=update.logprobs,
                    finish_reason=update.finish_reason,
                    stop_reason=update.stop_reason,
                )
            )
        if update.result:
            self._put(ended_event(self._id, update.result))


class EngineHost:
    def __init__(self, opened: OpenedEngine, put: Put) -> None:
        self.engine = opened.engine
        self.thread = EngineThread(self.engine)
        self.info = engine_info(opened)
        self._spec = opened.spec
        self._put = put

    def report(self) -> frames.Report:
        return report_of(self.thread.call(self.engine.stats))

    def handle(self, command: frames.Command) -> None:
        try:
            match command:
                case frames.Abort(request_id):
                    self.thread.abort([request_id])
                    return
                case frames.Finish(request_id):
                    self.thread.finish(request_id)
                    return
                case frames.Release(_, names, prefix):
                    self.thread.release(names)
                    if prefix:
                        self.thread.release_all(prefix)
                    return
                case frames.Add():
                    self._add(command)
                    return
                case frames.LoadAdapter(request_id, name, path):
                    adapter, digest = _read_adapter(path, self._spec)
                    self.thread.call(lambda: self.engine.load_adapter(name, adapter))
                    self._put(frames.Accepted(request_id, digest))
                    return
                case frames.MapBlocks(request_id):
                    self._put(blocks_of(request_id, self.thread.call(self.engine.block_map)))
                    return
                case frames.UnloadAdapter(_, name):
                    self.thread.call(lambda: self.engine.unload_adapter(name))
            self._put(frames.Accepted(command.id))
        except Exception as error:
            self._put(refused_event(command.id, error))

    def _add(self, command: frames.Add) -> None:
        request = self.engine.check(
            command.prompt_token_ids,
            command.params,
            command.options,
            pooling=command.pooling,
            output_token_ids=command.output_token_ids,
        )
        self._put(frames.Accepted(command.id))
        self.thread.add([request], [command.id], _RequestSink(command.id, self._put))

    def close(self) -> None:
        self.thread.close()


def refused_event(request_id: str, error: BaseException) -> frames.Refused:
    match error:
        case RequestError():
            return frames.Refused(request_id, "request", str(error))
        case NonFiniteLogitsError():
            return frames.Refused(request_id, "not_finite", str(error))
        case ClosedError():
            return frames.Refused(request_id, "closed", str(error))
        case RankLostError():
            return frames.Refused(request_id, "rank_lost", str(error))
        case MemoryLimitError() | RankFailedError():  # a step that failed for this request alone
            return frames.Refused(request_id, "internal", str(error))
        case HeadraceError():
            return frames.Refused(request_id, "request", str(error))
    return frames.Refused(request_id, "internal", f"{type(error).__name__}: {error}")


def ended_event(request_id: str, result: RequestOutput) -> frames.Ended:
    timing, embedding = result.timing, result.embedding
    return frames.Ended(
        id=request_id,
        prompt_tokens=len(result.prompt_token_ids),
        cached_tokens=result.cached_tokens,
        queue=timing.queue,
        prefill=timing.prefill,
        decode=timing.decode,
        detokenise=timing.detokenise,
        error=refused_event(request_id, result.error) if result.error else None,
        prompt_logprobs=result.prompt_logprobs,
        embedding=None if embedding is None else embedding.astype("<f4").tobytes(),
    )


def report_of(stats: Stats) -> frames.Report:
    figures = {
        name: float(value)
        for name, value in stats._asdict().items()
        if isinstance(value, int | float)
    }
    figures |= {name: float(getattr(stats, name)) for name in _KV_FIGURES}
    for name in STEP_KINDS:
        totals: StepTotals = getattr(stats, name)
        figures |= {f"{name}.{key}": float(value) for key, value in totals._asdict().items()}
    figures |= {f"learning.{key}": float(v) for key, v in stats.learning._asdict().items()}
    drafts = {
        name: [float(counts.steps), float(counts.proposed), float(counts.accepted)]
        for name, counts in stats.drafts.items()
    }
    return frames.Report(figures, dict(stats.adapters), drafts)


def blocks_of(request_id: str, block_map: BlockMap) -> frames.Blocks:
    groups = [
        frames.GroupBlocks(
            layers=group.layers,
            window=group.window,
            num_blocks=group.num_blocks,
            holdings=[_encode_holding(holding) for holding in group.holdings],
            cached=_runs(sorted(group.cached)),
        )
        for group in block_map.groups
    ]
    return frames.Blocks(request_id, block_map.block_size, groups)


def _encode_holding(holding: Holding) -> frames.Holding:
    present = [block for block in holding.blocks if block >= 0]
    return frames.Holding(
        request=holding.request,
        seq=holding.seq,
        computed=holding.computed,
        released=len(holding.blocks) - len(present),
        runs=_runs(present),
    )


def _runs(blocks: Sequence[int]) -> list[int]:
    """Runs are pairs: the first id and the length."""
    if not blocks:
        return []
    ids = np.asarray(blocks)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    lengths = np.diff(starts, append=len(ids))
    return [int(n) for pair in zip(ids[starts], lengths, strict=True) for n in pair]


def engine_info(opened: OpenedEngine) -> frames.EngineInfo:
    engine, spec = opened.engine, opened.spec
    limits, config, stats = engine.limits, engine.config, engine.stats()
    return frames.EngineInfo(
        architecture=spec.architecture,
        vocab_size=limits.vocab_size,
        dim=spec.dim,
        max_model_len=limits.max_model_len,
        max_num_seqs=config.max_seqs,
        kv_tokens=max(limits.kv.num_blocks) * limits.kv.block_size,
        kv_bytes=stats.kv_bytes,
        weight_bytes=engine.weight_bytes,
        kv_dtype=limits.kv.dtype,
        threads=config.threads,
        backend=config.backend,
        lossy=engine.losses,
        mode_price=engine.mode_price,
        memory=limits.memory,
        runtime=limits.runtime,
        activations=config.activations,
        block_size=limits.kv.block_size,
        latent_attention=config.latent_attention,
        acceptance_method=config.acceptance_method,
        instructions=engine.instructions,
        version=version("headrace"),
        adapters=opened.adapters,
    )
