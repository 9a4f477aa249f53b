"""Runs one rung of a climb: the work, its times and memory, and the quality of its formats."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from headrace.backend import forward
from headrace.backend.cpu.executable import CpuExecutable, lower_unfused
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.convert.quality import QualityMeter, Scorer
from headrace.convert.sequence_batch import num_blocks, sequence_batch
from headrace.errors import HeadraceError
from headrace.loader.drafts import model_program
from headrace.loader.key_rounding import key_rounding_of
from headrace.loader.load import load_engine, open_model
from headrace.loader.options import engine_config
from headrace.measure.climb_rungs import LOOPS, Mode
from headrace.measure.climb_work import evenly
from headrace.model import trace_model
from headrace.planner import host
from headrace.quant.arrays import Floats
from headrace.record import frozen
from headrace.sampling_params import SamplingParams

PLAIN_ISA = "portable"
"""Kernels in plain C++."""
_WARM_TOKENS = 8

ShareCallback = Callable[[float], None]
Items = Sequence[tuple[Sequence[int], int]]
"""Prompts, and lengths of outputs."""


@frozen(kw_only=True)
class Text:
    """A text on which the formats of a rung are judged."""

    pieces: list[list[int]]
    prefix: int
    """Tokens of each piece that are given."""
    reference: str
    """File with log-probabilities in float32."""
    writes: bool
    """Whether this rung writes that file."""


@frozen(kw_only=True)
class Task:
    """A rung for another process, as JSON."""

    mode: Mode
    path: str
    options: dict[str, Any]
    items: list[tuple[list[int], int]]
    """Prompts, and lengths of outputs; for `recompute` contexts, each with one token."""
    probes: list[list[int]]
    length: int
    """Tokens of the longest sequence."""
    seconds: float
    """Seconds after which a rung that may do a part of the work ends."""
    runs: int
    """Runs of a batch that takes less time than these seconds."""
    text: Text | None = None


@frozen(kw_only=True)
class Measured:
    """Figures of a rung, as JSON."""

    done: list[int]
    """Numbers of the finished items."""
    outputs: list[list[int]]
    """Token ids of the finished items."""
    seconds: float
    """Median of the runs."""
    samples: list[float]
    """Seconds of each run; a fast rung runs several times."""
    first_token: float
    """Median seconds to the first token of a request that is alone; of `recompute`, to a token."""
    first_tokens: list[float]
    """Seconds to the first token of each finished item, from its start or, in a batch, from the
    start of the run.
    """
    peak_memory: int
    weight_bytes: int
    drafted: int
    accepted: int
    quality: dict[str, float] | None


def run_task(task: Task, on_share: ShareCallback) -> Measured:
    """Run a rung in this process. Raises as `load_model`."""
    config = engine_config({**task.options, "backend": "cpu", "max_model_len": task.length})
    checkpoint = open_model(task.path, config)
    if task.mode in LOOPS:
        return _run_loop(task, checkpoint, on_share)
    return _run_engine(task, checkpoint, config, on_share)


class _Loop:
    """The program in its own ops and in plain C++, on one thread, as in a first version."""

    def __init__(self, checkpoint: Checkpoint, length: int) -> None:
        program = trace_model(checkpoint.spec, checkpoint.tensors)
        self._blocks, self._groups = num_blocks(length), len(program.kv_groups)
        self.executable = CpuExecutable(
            program,
            checkpoint.tensors,
            KvConfig((self._blocks,) * self._groups, dtype="f32"),
            1,
            PLAIN_ISA,
            lower=lower_unfused,
            activations="f32",
        )
        self.executable.wait_for_weights()

    def next_token(self, tokens: Sequence[int], computed: int) -> int:
        """The likeliest token after `tokens`, of which the first `computed` have KV."""
        batch = sequence_batch(tokens, computed, len(tokens), 1, self._blocks, self._groups)
        logits = forward(self.executable, batch).logits
        assert logits is not None
        return int(logits[0].argmax())

    def output(self, prompt: Sequence[int], num_tokens: int) -> Iterator[int]:
        tokens, computed = list(prompt), 0
        for _ in range(num_tokens):
            token = self.next_token(tokens, computed)
            computed = len(tokens)
            tokens.append(token)
            yield token


class _Served(NamedTuple):
    outputs: list[list[int]]
    first_tokens: list[float]
    seconds: float


def _run_loop(task: Task, checkpoint: Checkpoint, on_share: ShareCallback) -> Measured:
    loop = _Loop(checkpoint, task.length)
    loop.next_token(task.probes[0][:_WARM_TOKENS], 0)

    def serve(item: tuple[Sequence[int], int]) -> _Served:
        start, times, output = perf_counter(), [], []
        for token in loop.output(*item):
            times.append(perf_counter() - start)
            output.append(token)
        return _Served([output], times[:1], times[-1])

    part = _run_part(task, serve, on_share)
    return Measured(
        done=part.done,
        outputs=part.outputs,
        seconds=part.seconds,
        samples=[part.seconds],
        first_token=median(part.first_tokens),
        first_tokens=part.first_tokens,
        peak_memory=host.peak_memory(),
        weight_bytes=loop.executable.program.weight_bytes,
        drafted=0,
        accepted=0,
        quality=None,
    )


class _Part(NamedTuple):
    done: list[int]
    outputs: list[list[int]]
    first_tokens: list[float]
    seconds: float


def _run_part(
    task: Task,
    serve: Callable[[tuple[Sequence[int], int]], _Served],
    on_share: ShareCallback,
) -> _Part:
    """Run items one by one, in an evenly spread order, until the time is over."""
    runs: dict[int, _Served] = {}
    seconds = 0.0
    for number in evenly(len(task.items)):
        if runs and seconds >= task.seconds:
            break
        runs[number] = serve(task.items[number])
        seconds += runs[number].seconds
        on_share(max(len(runs) / len(task.items), min(1.0, seconds / task.seconds)))
    return _Part(
        list(runs),
        [run.outputs[0] for run in runs.values()],
        [run.first_tokens[0] for run in runs.values()],
        seconds,
    )


def _run_engine(
    task: Task, checkpoint: Checkpoint, config: EngineConfig, on_share: ShareCallback
) -> Measured:
    with _Session(task.path, config, checkpoint, task.probes) as session:
        if task.mode == "batch":
            part = _Part(list(range(len(task.items))), *session.serve(task.items, on_share))
        else:
            part = _run_part(task, lambda item: session.serve([item]), on_share)
        proposed, accepted = session.drafts()
        alone = [session.serve([(probe, 1)]).seconds for probe in task.probes]
        peak_memory, engine = host.peak_memory(), session.engine
        weight_bytes, resolved = engine.weight_bytes, engine.config

    samples = [part.seconds]
    if task.mode == "batch" and part.seconds < task.seconds:
        # A new engine each time: caches and proposers know nothing of the work.
        for _ in range(task.runs - 1):
            with _Session(task.path, config, checkpoint, task.probes) as session:
                again = session.serve(task.items)
            if again.outputs != part.outputs:
                raise HeadraceError("two runs of the same requests gave different tokens")
            samples.append(again.seconds)
    return Measured(
        done=part.done,
        outputs=part.outputs,
        seconds=median(samples),
        samples=samples,
        first_token=median(alone),
        first_tokens=part.first_tokens,
        peak_memory=peak_memory,
        weight_bytes=weight_bytes,
        drafted=proposed,
        accepted=accepted,
        quality=_judge(task.text, checkpoint, resolved) if task.text else None,
    )


class _Session:
    """A warm engine."""

    def __init__(
        self,
        path: str,
        config: EngineConfig,
        checkpoint: Checkpoint,
        probes: Sequence[Sequence[int]],
    ) -> None:
        self.engine = load_engine(path, config, checkpoint, checkpoint.load_tokenizer)
        # Other prompts, backwards: no block of theirs begins as the work does.
        self.serve([(probe[::-1], _WARM_TOKENS) for probe in probes])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    def serve(self, items: Items, on_share: ShareCallback = lambda share: None) -> _Served:
        """Submit the requests together. Raises the error of a failed request."""
        start, engine = perf_counter(), self.engine
        outputs: dict[str, list[int]] = {}
        first: dict[str, float] = {}
        waiting: dict[str, int] = {}
        total = sum(len(prompt) + num_tokens for prompt, num_tokens in items)
        done = 0
        for prompt, num_tokens in items:
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            request_id = engine.add_request(prompt, params)
            outputs[request_id], waiting[request_id] = [], len(prompt)
        while engine.has_work:
            for update in engine.step():
                if update.result and update.result.error:
                    raise update.result.error
                outputs[update.request_id] += update.token_ids
                done += len(update.token_ids)
                if update.token_ids and update.request_id in waiting:
                    first[update.request_id] = perf_counter() - start
                    done += waiting.pop(update.request_id)
            on_share(done / total)
        return _Served(list(outputs.values()), list(first.values()), perf_counter() - start)

    def drafts(self) -> tuple[int, int]:
        """Proposed and accepted draft tokens."""
        drafts = self.engine.stats().drafts.values()
        return sum(one.proposed for one in drafts), sum(one.accepted for one in drafts)


def _judge(text: Text, checkpoint: Checkpoint, config: EngineConfig) -> dict[str, float]:
    """Score the rung's number formats, after its memory was read."""
    scorer = Scorer(
        model_program(config, checkpoint),
        checkpoint.tensors,
        max(map(len, text.pieces)),
        "cpu",
        config.threads,
        config.kv_format,
        config.activations,
        key_rounding_of(config, checkpoint),
    )
    meter, vocab = QualityMeter(text.prefix), checkpoint.spec.vocab_size
    try:
        if text.writes:
            with Path(text.reference).open("wb") as file:
                for piece in text.pieces:
                    meter.add(piece, _written(scorer.log_probabilities(piece), file), None)
        else:
            has_reference = Path(text.reference).exists()
            chunks = _reference(Path(text.reference), vocab) if has_reference else None
            for piece in text.pieces:
                meter.add(piece, scorer.log_probabilities(piece), chunks)
    finally:
        scorer.close()
    quality = {name: value for name, value in vars(meter.quality()).items() if value is not None}
    return quality


def _written(chunks: Iterator[Floats], file: BinaryIO) -> Iterator[Floats]:
    for chunk in chunks:
        file.write(len(chunk).to_bytes(8, "little"))
        file.write(np.ascontiguousarray(chunk, np.float32).tobytes())
        yield chunk


def _reference(path: Path, vocab: int) -> Iterator[Floats]:
    with path.open("rb") as file:
        while head := file.read(8):
            rows = int.from_bytes(head, "little")
            yield np.frombuffer(file.read(4 * rows * vocab), np.float32).reshape(rows, vocab)
