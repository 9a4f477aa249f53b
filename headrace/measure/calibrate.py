"""Measures which drafter saves time for a model, and the layers of the model that draft best."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.backend import Executable, compile_program
from headrace.backend_traits import BackendName
from headrace.checkpoint.draft_layers import num_draft_layers
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.loader.backend_choice import with_backend
from headrace.loader.drafts import OWN_LAYERS, DraftCheckpoints, open_draft_checkpoints
from headrace.loader.layers import layers_text
from headrace.loader.load import open_files
from headrace.loader.memory import fit_memory
from headrace.loader.options import engine_config
from headrace.measure.drafters import Drafter, MeasuredDrafter, compare_drafters
from headrace.measure.layer_search import search_layers
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.measure.text_meter import CalibrationText, TextMeter
from headrace.model import trace_model
from headrace.planner.draft_gain import Costs, Gain, best_gain
from headrace.planner.host import usable_cores
from headrace.record import frozen
from headrace.validation import integer

PROMPT = "Write a short story about a miller who builds a channel to bring water to the mill.\n\n"
TOKENS = 256
MIN_SPEEDUP = 1.05
_EIGHTHS = (2, 3, 4, 5, 6, 7)
"""In eighths of all layers."""


@frozen(kw_only=True)
class MeasuredDraft:
    name: str
    layers: int | tuple[int, ...]
    """Number of the model's first layers that draft, or a set."""
    acceptance: float
    """Share of the greedy tokens that the draft predicts."""
    costs: Costs

    @property
    def best(self) -> Gain:
        return best_gain(self.acceptance, self.costs)

    def engine_options(self) -> dict[str, Any]:
        """Options of `LLM` for these layers, without the depth."""
        chosen = self.layers if isinstance(self.layers, int) else layers_text(self.layers)
        return {"proposer": "self_draft", "draft_layers": chosen}


@frozen(kw_only=True)
class Calibration:
    drafts: tuple[MeasuredDraft, ...]
    """By some of the model's own layers."""
    drafters: tuple[MeasuredDrafter, ...]
    """Measured in the engine. The best layers are among them if their expected speed pays."""

    @property
    def best_layers(self) -> MeasuredDraft | None:
        """The layers with the highest expected speed."""
        return max(self.drafts, key=lambda draft: draft.best.speedup, default=None)

    @property
    def suggestion(self) -> MeasuredDrafter | None:
        """The fastest drafter for a single sequence, if it was faster than plain decoding, and at
        no measured batch too slow.
        """
        paying = [each for each in self.drafters if each.pays]
        return max(paying, key=lambda each: each.speeds[0].speed, default=None)

    def facts(self) -> dict[str, Any]:
        """The calibration as JSON, in seconds."""
        suggestion = self.suggestion
        return {
            "layers": [_draft_facts(draft) for draft in self.drafts],
            "drafters": [each.facts() for each in self.drafters],
            "suggestion": suggestion.options if suggestion else None,
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
    draft_model: str | Sequence[str] = (),
    medusa_heads: str = "",
    layers: Sequence[int] = (),
    prompt: str = PROMPT,
    tokens: int = TOKENS,
    max_depth: int = 8,
    backend: BackendName = EngineConfig.backend,
    threads: int = EngineConfig.threads,
    on_progress: ProgressCallback = ignore_progress,
) -> Calibration:
    """Measure which drafter saves time for a model, if one does.

    The suffix tree, the layers for drafts in the model's own files and the best of the model's own
    layers are compared with plain decoding, for 1, 4 and 16 sequences at once.

    Args:
        draft_model: smaller models and drafters, which are compared too.
        medusa_heads: file or folder of Medusa heads, which are compared too.
        layers: numbers of first layers to measure. By default eighths of all, and sets of any
            layers, which the first half of the text chooses and the second half measures.
        prompt: start of the text that the model writes, and first request of the comparison.
        tokens: length of that text.
        max_depth: maximum draft tokens in a row.
        threads: 0: one for each usable core.

    Raises RequestError if the text exceeds the context or `layers` the model, ModelError as
    `load_model`, and MemoryLimitError.
    """
    integer("tokens", tokens, 1, 2**20)
    integer("max_depth", max_depth, 1, 64)
    options: dict[str, Any] = {"backend": backend, "threads": threads, "max_num_seqs": 1}
    config = engine_config(options)
    checkpoint = open_files(model, config)
    counts = _checked_layers(layers, checkpoint.spec.num_layers)
    tokenizer = checkpoint.load_tokenizer()
    text = CalibrationText(tokenizer.encode(prompt), tokens, max_depth)
    if text.length > checkpoint.spec.max_context:
        raise RequestError(
            f"the calibration needs a context of {text.length:,} tokens, and the model's ends at "
            f"{checkpoint.spec.max_context:,}; lower tokens"
        )

    named = [draft_model] if isinstance(draft_model, str) and draft_model else list(draft_model)
    drafters = _drafters(checkpoint, named, medusa_heads)
    for drafter in drafters:  # a wrong name ends the call before minutes of measuring
        own = engine_config({**options, **drafter.options})
        open_draft_checkpoints(own, checkpoint, lambda: tokenizer)

    config = with_backend(
        replace(config, max_model_len=text.length), checkpoint, DraftCheckpoints()
    )
    drafts = _measure_layers(config, checkpoint, counts, text, on_progress, search=not layers)
    calibration = Calibration(drafts=drafts, drafters=())
    best = calibration.best_layers
    if best and best.best.speedup >= MIN_SPEEDUP:
        drafters.append(Drafter(name=best.name, options=best.engine_options()))
    found = compare_drafters(
        model,
        drafters,
        config,
        on_progress,
        prompts=[prompt],
        tokens=tokens,
        max_depth=max_depth,
    )
    return replace(calibration, drafters=found)


def _drafters(checkpoint: Checkpoint, named: Sequence[str], medusa_heads: str) -> list[Drafter]:
    """What the model has without a choice of layers, and what the caller names."""
    found = [Drafter(name="suffix tree", options={"proposer": "suffix"})]
    if num_draft_layers(checkpoint) and OWN_LAYERS not in named:
        named = [OWN_LAYERS, *named]
    found += [
        Drafter(name=name, options={"proposer": "draft_model", "draft_model": name})
        for name in named
    ]
    if medusa_heads:
        options = {"proposer": "medusa", "medusa_heads": medusa_heads}
        found.append(Drafter(name="Medusa heads", options=options))
    return found


def _measure_layers(
    config: EngineConfig,
    checkpoint: Checkpoint,
    counts: Sequence[int],
    text: CalibrationText,
    on_progress: ProgressCallback,
    *,
    search: bool,
) -> tuple[MeasuredDraft, ...]:
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    kv, _, _ = fit_memory(config, checkpoint, program, DraftCheckpoints(), text.length)
    on_progress("writing a text", 0.0)
    target = compile_program(
        config.backend, program, checkpoint.tensors, kv, config.threads or usable_cores()
    )
    try:
        meter = TextMeter(target, text, kv.block_size)

        def attached(layers: Sequence[int]) -> Executable:
            program = trace_model(checkpoint.spec.with_layers(layers), checkpoint.tensors)
            return target.attach(program, checkpoint.tensors)

        executables: dict[int | tuple[int, ...], Executable] = {
            count: attached(range(count)) for count in counts
        }
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
        MeasuredDraft(name=_name(key, num_layers), layers=key, acceptance=acceptance, costs=costs)
        for key, (acceptance, costs) in zip(executables, measured, strict=True)
    )


def _name(layers: int | tuple[int, ...], num_layers: int) -> str:
    if isinstance(layers, int):
        return f"{layers} of {num_layers} layers"
    return f"layers {layers_text(layers)}"


def _checked_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    for count in layers:
        if not 1 <= count < num_layers:
            raise RequestError(
                f"layers {count} is not below the {num_layers} layers of this model; use 1 to "
                f"{num_layers - 1}"
            )
    default = {max(1, num_layers * eighths // 8) for eighths in _EIGHTHS} - {num_layers}
    return list(layers) or sorted(default)
