"""Measures draft models, and the speedup of speculative decoding."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.backend import Executable, compile_program
from headrace.backend_traits import BackendName
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.errors import RequestError
from headrace.llm import LLM
from headrace.loader.backend_choice import with_backend
from headrace.loader.drafts import (
    DraftCheckpoints,
    compile_draft_models,
    open_draft_checkpoints,
)
from headrace.loader.layers import layers_text
from headrace.loader.load import open_files
from headrace.loader.memory import fit_memory
from headrace.loader.options import engine_config
from headrace.measure.layer_search import search_layers
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.measure.text_meter import CalibrationText, TextMeter
from headrace.model import trace_model
from headrace.planner.draft_gain import Costs, Gain, best_gain
from headrace.planner.host import usable_cores
from headrace.record import frozen
from headrace.sampling_params import SamplingParams
from headrace.validation import integer

PROMPT = "Write a short story about a miller who builds a channel to bring water to the mill.\n\n"
TOKENS = 256
MIN_SPEEDUP = 1.05
TRIAL_RUNS = 3
_EIGHTHS = (2, 3, 4, 5, 6, 7)
"""In eighths of all layers."""


@frozen(kw_only=True)
class MeasuredDraft:
    name: str
    layers: int | tuple[int, ...] | None
    """Number of the model's first layers that draft, or a set; None for another model."""
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
        chosen = self.layers if isinstance(self.layers, int) else layers_text(self.layers)
        return {"proposer": "self_draft", "draft_layers": chosen}


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
    """Of the best draft; None if its expected speed does not pay."""

    @property
    def best(self) -> MeasuredDraft:
        """The draft with the highest expected speed."""
        return max(self.drafts, key=lambda draft: draft.best.speedup)

    @property
    def suggestion(self) -> MeasuredDraft | None:
        """The best draft if it was faster than plain decoding when it was timed."""
        return self.best if self.trial and self.trial.speed > 1 else None

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
            "suggestion": self.suggestion.name if self.suggestion else None,
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
    tokens: int = TOKENS,
    max_depth: int = 8,
    backend: BackendName = EngineConfig.backend,
    threads: int = EngineConfig.threads,
    on_progress: ProgressCallback = ignore_progress,
) -> Calibration:
    """Measure whether speculative decoding saves time, and with which draft model.

    Args:
        draft_model: a smaller model, measured next to first layers.
        layers: numbers of first layers to measure. By default eighths of all, and sets of any
            layers, which the first half of the text chooses and the second half measures.
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
    counts = _checked_layers(layers, checkpoint.spec.num_layers, draft_model)
    tokenizer = checkpoint.load_tokenizer()
    text = CalibrationText(tokenizer.encode(prompt), tokens, max_depth)
    if text.length > checkpoint.spec.max_context:
        raise RequestError(
            f"the calibration needs a context of {text.length:,} tokens, and the model's ends at "
            f"{checkpoint.spec.max_context:,}; lower tokens"
        )

    config = replace(config, max_model_len=text.length)
    draft_checkpoints = open_draft_checkpoints(config, checkpoint, lambda: tokenizer)
    if draft_checkpoints.drafter:
        raise RequestError(
            f"draft_model '{draft_model}' is a drafter over rows of the model, and calibrate "
            "measures models that read tokens; leave it out, or compare with `headrace bench`"
        )
    config = with_backend(config, checkpoint, draft_checkpoints)
    drafts = _measure_drafts(
        config, checkpoint, draft_checkpoints, counts, text, on_progress, search=not layers
    )
    calibration = Calibration(drafts=drafts, trial=None)
    best = calibration.best
    if best.best.speedup < MIN_SPEEDUP:
        return calibration
    trial = _try_draft(model, best, prompt, tokens, config, on_progress)
    return replace(calibration, trial=trial)


def _measure_drafts(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft_checkpoints: DraftCheckpoints,
    counts: Sequence[int],
    text: CalibrationText,
    on_progress: ProgressCallback,
    *,
    search: bool,
) -> tuple[MeasuredDraft, ...]:
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    kv, draft_kv, _ = fit_memory(config, checkpoint, program, draft_checkpoints, text.length)
    on_progress("writing a text", 0.0)
    target = compile_program(
        config.backend, program, checkpoint.tensors, kv, config.threads or usable_cores()
    )
    try:
        meter = TextMeter(target, text, kv.block_size)
        executables: dict[str | int | tuple[int, ...], Executable] = {}

        def attached(layers: Sequence[int]) -> Executable:
            program = trace_model(checkpoint.spec.with_layers(layers), checkpoint.tensors)
            return target.attach(program, checkpoint.tensors)

        if config.draft_model:
            executables[config.draft_model] = _compile_draft_model(
                config, draft_checkpoints, checkpoint, target, draft_kv
            )
        for count in counts:
            executables[count] = attached(range(count))
        half = meter.num_tokens // 2 if search else 0
        if half:
            sets = search_layers(
                checkpoint,
                lambda layers: meter.acceptance(attached(layers), 0, half),
                on_progress,
            )
            executables |= {layers: attached(layers) for layers in sets}
        measured = meter.measure(list(executables.values()), on_progress, half)
    finally:
        target.close()

    num_layers = checkpoint.spec.num_layers
    return tuple(
        MeasuredDraft(
            name=_name(key, num_layers),
            layers=None if isinstance(key, str) else key,
            acceptance=acceptance,
            costs=costs,
        )
        for key, (acceptance, costs) in zip(executables, measured, strict=True)
    )


def _name(draft: str | int | tuple[int, ...], num_layers: int) -> str:
    if isinstance(draft, str):
        return draft
    if isinstance(draft, int):
        return f"{draft} of {num_layers} layers"
    return f"layers {layers_text(draft)}"


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
