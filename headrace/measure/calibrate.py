"""Measures draft models, and the speedup of speculative decoding."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable, compile_program, forward
from headrace.backend_traits import BackendName
from headrace.batch import Ints, RaggedBatch
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.errors import RequestError
from headrace.kv.blocks import Table
from headrace.kv.rows import TokenRun, batch_of_runs
from headrace.llm import LLM
from headrace.loader.backend_choice import with_backend
from headrace.loader.drafts import (
    DraftCheckpoints,
    compile_draft_models,
    open_draft_checkpoints,
)
from headrace.loader.load import open_files
from headrace.loader.memory import fit_memory
from headrace.loader.options import engine_config
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.model import trace_model
from headrace.planner.draft_gain import Costs, Gain, best_gain
from headrace.planner.host import usable_cores
from headrace.record import frozen
from headrace.sampling_params import SamplingParams
from headrace.validation import integer

PROMPT = "Write a short story about a miller who builds a channel to bring water to the mill.\n\n"
MIN_SPEEDUP = 1.05
TRIAL_RUNS = 3
_EIGHTHS = (2, 3, 4, 5, 6, 7)
"""In eighths of all layers."""
_CHUNK = 64
"""Rows of a step, whose logits are all kept."""
_ROUNDS = 15
_DRAFT_STEPS = 3
"""Draft steps timed in a row, so that caches are as in a real draft."""


@frozen(kw_only=True)
class MeasuredDraft:
    name: str
    layers: int | None
    """Number of the model's first layers that draft; None for another model."""
    acceptance: float
    """Share of the greedy tokens that the draft model predicts."""
    costs: Costs

    @property
    def best(self) -> Gain:
        return best_gain(self.acceptance, self.costs)

    def engine_options(self) -> dict[str, Any]:
        """Options of `LLM` for this draft model, without the depth."""
        if self.layers is None:
            return {"proposer": "draft_model", "draft_model": self.name}
        return {"proposer": "self_draft", "draft_layers": self.layers}


@frozen(kw_only=True)
class Trial:
    """Speculative decoding, timed against plain decoding."""

    options: dict[str, Any]
    tokens_per_step: float
    speedups: tuple[float, ...]
    """Plain seconds over speculative seconds, of each run."""

    @property
    def speed(self) -> float:
        return statistics.median(self.speedups)

    @property
    def spread(self) -> str:
        return f"{min(self.speedups):.2f}-{max(self.speedups):.2f}"


@frozen(kw_only=True)
class Calibration:
    drafts: tuple[MeasuredDraft, ...]
    trial: Trial | None

    @property
    def best(self) -> MeasuredDraft:
        return max(self.drafts, key=lambda draft: draft.best.speedup)

    def facts(self) -> dict[str, Any]:
        """The calibration as JSON, in seconds."""
        trial = self.trial and {
            "options": self.trial.options,
            "tokens_per_step": self.trial.tokens_per_step,
            "speed": self.trial.speed,
            "spread": self.trial.spread,
        }
        return {
            "candidates": [_draft_facts(draft) for draft in self.drafts],
            "suggestion": self.best.name if trial else None,
            "trial": trial,
        }


def _draft_facts(draft: MeasuredDraft) -> dict[str, Any]:
    return {
        "name": draft.name,
        "acceptance": draft.acceptance,
        "draft_seconds": draft.costs.draft,
        "target_seconds": list(draft.costs.target),
        **draft.best._asdict(),
    }


def calibrate(
    model: str,
    *,
    draft_model: str = "",
    layers: Sequence[int] = (),
    prompt: str = PROMPT,
    tokens: int = 192,
    max_depth: int = 8,
    backend: BackendName = EngineConfig.backend,
    threads: int = EngineConfig.threads,
    on_progress: ProgressCallback = ignore_progress,
) -> Calibration:
    """Measure whether speculative decoding saves time, and with which draft model.

    Args:
        draft_model: a smaller model with the same vocabulary, measured next to first
            layers.
        layers: numbers of first layers to measure; by default eighths of all.
        prompt: start of the text that the model writes.
        tokens: length of that text.
        max_depth: maximum draft tokens in a row.
        threads: 0: one for each usable core.

    Raises RequestError if the text exceeds the context or `layers` the model, and
    MemoryLimitError.
    """
    integer("tokens", tokens, 1, 2**20)
    integer("max_depth", max_depth, 1, 64)
    options: dict[str, Any] = {"backend": backend, "threads": threads, "max_num_seqs": 1}
    if draft_model:
        options |= {"proposer": "draft_model", "draft_model": draft_model}
    config = engine_config(options)
    checkpoint = open_files(model, config)
    layers = _checked_layers(layers, checkpoint.spec.num_layers, draft_model)
    tokenizer = checkpoint.load_tokenizer()
    text = _Text(tokenizer.encode(prompt), tokens, max_depth)
    if text.length > checkpoint.spec.max_context:
        raise RequestError(
            f"the calibration needs a context of {text.length:,} tokens, and the model's ends at "
            f"{checkpoint.spec.max_context:,}; lower tokens"
        )

    config = replace(config, max_model_len=text.length)
    draft_checkpoints = open_draft_checkpoints(config, checkpoint, lambda: tokenizer)
    config = with_backend(config, checkpoint, draft_checkpoints)
    drafts = _measure_drafts(config, checkpoint, draft_checkpoints, layers, text, on_progress)
    calibration = Calibration(drafts=drafts, trial=None)
    best = calibration.best
    if best.best.speedup < MIN_SPEEDUP:
        return calibration
    trial = _try_draft(model, best, prompt, tokens, config, on_progress)
    return replace(calibration, trial=trial)


class _Text(NamedTuple):
    """The text that the model writes, and the depth up to which drafts are measured on it."""

    prompt: list[int]
    num_tokens: int
    max_depth: int

    @property
    def length(self) -> int:
        return len(self.prompt) + self.num_tokens + self.max_depth + 1


def _measure_drafts(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft_checkpoints: DraftCheckpoints,
    layers: Sequence[int],
    text: _Text,
    on_progress: ProgressCallback,
) -> tuple[MeasuredDraft, ...]:
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    kv, draft_kv, _ = fit_memory(config, checkpoint, program, draft_checkpoints, text.length)
    on_progress("writing a text", 0.0)
    target = compile_program(
        config.backend, program, checkpoint.tensors, kv, config.threads or usable_cores()
    )
    try:
        meter = _DraftMeter(target, text, kv.block_size)
        executables: dict[str | int, Executable] = {}
        if config.draft_model:
            executables[config.draft_model] = _compile_draft_model(
                config, draft_checkpoints, checkpoint, target, draft_kv
            )
        for count in layers:
            executables[count] = target.attach(
                trace_model(checkpoint.spec.with_layers(range(count)), checkpoint.tensors),
                checkpoint.tensors,
            )
        measured = meter.measure(list(executables.values()), on_progress)
    finally:
        target.close()

    num_layers = checkpoint.spec.num_layers
    return tuple(
        MeasuredDraft(
            name=key if isinstance(key, str) else f"{key} of {num_layers} layers",
            layers=None if isinstance(key, str) else key,
            acceptance=acceptance,
            costs=costs,
        )
        for key, (acceptance, costs) in zip(executables, measured, strict=True)
    )


def _checked_layers(layers: Sequence[int], num_layers: int, draft_model: str) -> list[int]:
    if num_layers == 1 and not draft_model:
        raise RequestError(
            "the model has one layer, so its first layers cannot draft; set draft_model to a "
            "smaller model"
        )
    for count in layers:
        if not 1 <= count < num_layers:
            raise RequestError(
                f"layers {count} is not below the {num_layers} layers of this model; use 1 to "
                f"{num_layers - 1}"
            )
    default = {max(1, num_layers * eighths // 8) for eighths in _EIGHTHS} - {num_layers}
    return list(layers) or sorted(default)


def _compile_draft_model(
    config: EngineConfig,
    draft_checkpoints: DraftCheckpoints,
    checkpoint: Checkpoint,
    target: Executable,
    kv: KvConfig | None,
) -> Executable:
    draft = compile_draft_models(config, draft_checkpoints, checkpoint, target, kv).draft
    assert draft is not None, "the configuration names a draft model"
    return draft.executable


class Measured(NamedTuple):
    acceptance: float
    costs: Costs


class _DraftMeter:
    """Measures draft models against the text that a compiled model writes after a prompt."""

    def __init__(self, target: Executable, text: _Text, block_size: int) -> None:
        self._target = target
        self._num_prompt = len(text.prompt)
        self._max_depth = text.max_depth
        self._block_size = block_size
        self._blocks = range(-(-text.length // block_size))
        self._text = list(text.prompt)
        self._write(text.num_tokens)

    def measure(
        self, drafts: Sequence[Executable], on_progress: ProgressCallback
    ) -> list[Measured]:
        """Measure acceptance and costs of each draft model.

        The timed steps take turns, so that a busy machine slows all of them.
        """
        acceptances = []
        for number, draft in enumerate(drafts):
            on_progress(f"acceptance of draft model {number + 1}", number / len(drafts))
            predicted = self._predictions(draft)[:-1]
            acceptances.append(float(np.mean(predicted == self._text[self._num_prompt :])))

        depths = range(self._max_depth + 1)
        target_seconds: list[list[float]] = [[] for _ in depths]
        draft_seconds: list[list[float]] = [[] for _ in drafts]
        for number in range(_ROUNDS):
            on_progress(f"step times, round {number + 1} of {_ROUNDS}", number / _ROUNDS)
            for depth in depths:
                target_seconds[depth].append(self._step_seconds(self._target, 1 + depth))
            for draft, seconds in zip(drafts, draft_seconds, strict=True):
                steps = [self._step_seconds(draft, 1) for _ in range(_DRAFT_STEPS)]
                seconds.append(statistics.fmean(steps))

        target_medians = [statistics.median(seconds) for seconds in target_seconds]
        return [
            Measured(acceptance, Costs(target=target_medians, draft=statistics.median(seconds)))
            for acceptance, seconds in zip(acceptances, draft_seconds, strict=True)
        ]

    def _write(self, num_tokens: int) -> None:
        self._argmax(self._target, self._text[:-1], 0)
        for _ in range(num_tokens):
            last = len(self._text) - 1
            self._text.append(int(self._argmax(self._target, self._text[last:], last)[-1]))

    def _predictions(self, draft: Executable) -> NDArray[np.int64]:
        return self._argmax(draft, self._text, 0)[self._num_prompt - 1 :]

    def _argmax(
        self, executable: Executable, tokens: list[int], computed: int
    ) -> NDArray[np.int64]:  # [tokens]
        parts = [
            self._chunk_argmax(executable, tokens[start : start + _CHUNK], computed + start)
            for start in range(0, len(tokens), _CHUNK)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _chunk_argmax(
        self, executable: Executable, tokens: list[int], computed: int
    ) -> NDArray[np.int64]:
        logits = forward(executable, self._batch(executable, tokens, computed)).logits
        assert logits is not None, "the batch has logit rows"
        tokens_after: NDArray[np.int64] = logits.argmax(axis=1)
        return tokens_after

    def _batch(self, executable: Executable, tokens: list[int], computed: int) -> RaggedBatch:
        tables = tuple(Table(self._blocks) for _ in executable.kv_groups)
        batch = batch_of_runs([TokenRun(tokens, computed, tables)], self._block_size, logits=True)
        rows: Ints = np.arange(len(tokens), dtype=np.int32)
        return batch._replace(logit_rows=rows, seq_of=np.zeros_like(rows))

    def _step_seconds(self, executable: Executable, rows: int) -> float:
        batch = self._batch(executable, self._text[-rows:], len(self._text))
        started = time.perf_counter()
        executable.launch(batch).wait()
        return time.perf_counter() - started


def _try_draft(
    model: str,
    draft: MeasuredDraft,
    prompt: str,
    tokens: int,
    config: EngineConfig,
    on_progress: ProgressCallback,
) -> Trial:
    options = draft.engine_options() | {"draft_depth": draft.best.depth}
    common: dict[str, Any] = {
        "backend": config.backend,
        "threads": config.threads,
        "max_num_seqs": 1,
        "kv_blocks": (len(prompt.encode()) + tokens) // KvConfig.block_size + 2,
    }
    # The trial measures this depth, and the speculation controller would change it.
    speculation = options | {"adaptive_speculation": False}
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    speedups = []
    with LLM(model, **common) as plain, LLM(model, **common, **speculation) as speculative:
        for run in range(TRIAL_RUNS + 1):
            step = f"{draft.name} against plain decoding, run {run + 1} of {TRIAL_RUNS + 1}"
            on_progress(step, run / (TRIAL_RUNS + 1))
            seconds = []
            for llm in (plain, speculative):
                steps_before, started = llm.stats().steps, time.perf_counter()
                llm.generate(prompt, params)
                seconds.append(time.perf_counter() - started)
            num_steps = llm.stats().steps - steps_before
            speedups.append(seconds[0] / seconds[1])
    return Trial(
        options=options,
        tokens_per_step=tokens / num_steps,
        speedups=tuple(speedups[1:]),  # the first run warms up
    )
