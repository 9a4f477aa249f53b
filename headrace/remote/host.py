"""An engine that is told what to do by frames, and says by frames what comes of it, whatever
carries them.

In the engine process of a server that is a socket (`engine_process.py`), in a replica on Ray its
handle (`scaleout/ray_replica.py`).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.checkpoint.adapter import read_adapter
from headrace.checkpoint.source import resolve
from headrace.engine.engine import Engine
from headrace.engine.thread import EngineThread
from headrace.errors import (
    ClosedError,
    HeadraceError,
    MemoryLimitError,
    NonFiniteLogitsError,
    RequestError,
)
from headrace.loader.load import load_engine, open_model
from headrace.model.spec import ModelSpec
from headrace.remote import frames
from headrace.request import RequestOutput, Update
from headrace.stats import BlockMap, Holding, Stats

if TYPE_CHECKING:
    from headrace.parallel.launch import Launcher

Put = Callable[[frames.Event], None]
"""Takes an event, in any thread: must not block, and raises nothing."""


def open_engine(
    setup: frames.Setup, launcher: "Launcher | None" = None
) -> tuple[Engine, ModelSpec]:
    """The engine that is asked for, with its adapters, and what its model is; `launcher`: of its
    ranks, see `compile_ranks`.

    Raises as `load_model`.
    """
    checkpoint = open_model(setup.model, setup.config)
    engine = load_engine(
        setup.model, setup.config, checkpoint, checkpoint.load_tokenizer(), launcher
    )
    for name, path in setup.adapters.items():
        engine.load_adapter(name, read_adapter(resolve(path), checkpoint.spec))
    return engine, checkpoint.spec


class _Sink:
    """Receives the updates of one request."""

    def __init__(self, request_id: str, put: Put) -> None:
        self._id = request_id
        self._put = put

    def put(self, item: Update | BaseException, /) -> None:
        """Say what is new."""
        try:
            if not isinstance(item, BaseException):
                self._tell(item)
                return
        except Exception as error:
            item = error
        self._put(frames.Ended(self._id, 0, 0, 0, 0, 0, refused(self._id, item), None, None))

    def _tell(self, item: Update) -> None:
        if item.token_ids or item.text or item.finish_reason:
            news = (item.text, item.token_ids, item.logprobs, item.finish_reason, item.stop_reason)
            self._put(frames.StepOutput(self._id, item.index, *news))
        if item.result:
            self._put(ended(self._id, item.result))


class EngineHost:
    """One engine, in its thread."""

    def __init__(self, engine: Engine, spec: ModelSpec, put: Put) -> None:
        self.thread = EngineThread(engine)
        self.engine = engine
        self._spec = spec
        self._put = put
        self.info = engine_info(engine, spec)
        """What can be known of the engine once it is ready."""

    def report(self) -> frames.Report:
        """What the engine does now. Raises ClosedError."""
        return report_of(self.thread.call(self.engine.stats))

    def obey(self, command: frames.Command) -> None:
        """Carry out a command, whose answer and all that comes of it is said by events."""
        try:
            match command:
                case frames.Abort(request_id):
                    self.thread.abort([request_id])
                    return
                case frames.Add():
                    self._add(command)
                    return
                case frames.LoadAdapter(_, name, path):
                    adapter = read_adapter(resolve(path), self._spec)
                    self.thread.call(lambda: self.engine.load_adapter(name, adapter))
                case frames.MapBlocks(request_id):
                    self._put(blocks_of(request_id, self.thread.call(self.engine.block_map)))
                    return
                case frames.UnloadAdapter(_, name):
                    self.thread.call(lambda: self.engine.unload_adapter(name))
            self._put(frames.Accepted(command.id))
        except Exception as error:
            self._put(refused(command.id, error))

    def _add(self, command: frames.Add) -> None:
        request = self.engine.check(
            command.prompt_token_ids,
            command.params,
            command.options,
            pooling=command.pooling,
            output_token_ids=command.output_token_ids,
        )
        self._put(frames.Accepted(command.id))
        self.thread.add([request], [command.id], _Sink(command.id, self._put))

    def close(self) -> None:
        """End the engine, and all requests with it."""
        self.thread.close()


def refused(request_id: str, error: BaseException) -> frames.Refused:
    """An error as it crosses the socket: its kind, and a message that is of use to the client."""
    match error:
        case RequestError():
            return frames.Refused(request_id, "request", str(error))
        case NonFiniteLogitsError():
            return frames.Refused(request_id, "not_finite", str(error))
        case ClosedError():
            return frames.Refused(request_id, "closed", str(error))
        case MemoryLimitError():  # of a step that failed of this request alone
            return frames.Refused(request_id, "internal", str(error))
        case HeadraceError():
            return frames.Refused(request_id, "request", str(error))
    return frames.Refused(request_id, "internal", f"{type(error).__name__}: {error}")


def ended(request_id: str, result: RequestOutput) -> frames.Ended:
    """The end of a request, without what its news have said."""
    timing = result.timing
    return frames.Ended(
        request_id,
        len(result.prompt_token_ids),
        result.cached_tokens,
        *(timing.queue, timing.prefill, timing.decode),
        refused(request_id, result.error) if result.error else None,
        result.prompt_logprobs,
        None if result.embedding is None else result.embedding.astype("<f4").tobytes(),
    )


def report_of(stats: Stats) -> frames.Report:
    """The statistics as they cross the socket."""
    figures = {
        name: float(value)
        for name, value in stats._asdict().items()
        if isinstance(value, int | float)
    }
    for name in (
        "blocks_total",
        "blocks_free",
        "blocks_cached",
        "kv_bytes",
        "kv_bytes_used",
        "occupancy",
        "waste",
    ):
        figures[name] = float(getattr(stats, name))
    drafts = {
        name: [float(one.steps), float(one.proposed), float(one.accepted)]
        for name, one in stats.drafts.items()
    }
    return frames.Report(figures, dict(stats.adapters), drafts)


def blocks_of(request_id: str, blocks: BlockMap) -> frames.Blocks:
    """The map of the blocks as it crosses the socket: a full pool of one long sequence is then a
    few numbers.
    """
    groups = [
        frames.GroupBlocks(
            g.layers,
            g.window,
            g.num_blocks,
            [_holding(one) for one in g.holdings],
            _runs(sorted(g.cached)),
        )
        for g in blocks.groups
    ]
    return frames.Blocks(request_id, blocks.block_size, groups)


def _holding(held: Holding) -> frames.Holding:
    present = [block for block in held.blocks if block >= 0]
    return frames.Holding(
        held.request, held.seq, held.computed, len(held.blocks) - len(present), _runs(present)
    )


def _runs(blocks: Sequence[int]) -> list[int]:
    """Blocks as runs of neighbours: the first and the number of each."""
    if not blocks:
        return []
    ids = np.asarray(blocks)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    lengths = np.diff(starts, append=len(ids))
    return [int(n) for pair in zip(ids[starts], lengths, strict=True) for n in pair]


def engine_info(engine: Engine, spec: ModelSpec) -> frames.EngineInfo:
    """What the API process is told once the engine is ready."""
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
        lossy=config.lossy,
        activations=config.activations,
        block_size=limits.kv.block_size,
    )
