"""The layers that a student begins with: those without which the model loses least."""

from collections.abc import Sequence

import numpy as np

from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.convert.quality import QualityMeter, Scorer
from headrace.convert.texts import calibration_pieces
from headrace.distil.student_shape import evenly_spaced
from headrace.measure.progress import ProgressCallback, track
from headrace.model import trace_model

_TOKENS = 512
_STEP = "choosing layers"

Layers = tuple[int, ...]


def candidates(num_layers: int, count: int) -> list[Layers]:
    """Return choices of `count` layers: evenly spaced, or without a block of adjacent layers.

    Each has the first layer and the last, if `count` is above 1 (Gromov et al. 2024).
    """
    cut = num_layers - count
    blocks = [(*range(start), *range(start + cut, num_layers)) for start in range(1, max(2, count))]
    return list(dict.fromkeys([evenly_spaced(num_layers, count), *blocks]))


def best_layers(
    checkpoint: Checkpoint, count: int, threads: int, on_progress: ProgressCallback
) -> Layers:
    """Return the candidate with the smallest loss on a part of Python's language reference."""
    spec, tensors = checkpoint.spec, checkpoint.tensors
    choices = candidates(spec.num_layers, count)
    pieces = calibration_pieces(checkpoint, None, _TOKENS, _TOKENS)
    config = EngineConfig(backend="cpu")
    full = Scorer(
        trace_model(spec, tensors),
        tensors,
        _TOKENS,
        "cpu",
        threads,
        config.kv_format,
        config.activations,
    )
    try:
        losses = [
            _loss(full.attach(trace_model(spec.with_layers(layers), tensors), tensors), pieces)
            for layers in track(choices, len(choices), _STEP, on_progress)
        ]
    finally:
        full.close()
    return choices[int(np.argmin(losses))]


def _loss(scorer: Scorer, pieces: Sequence[Sequence[int]]) -> float:
    meter = QualityMeter()
    for piece in pieces:
        meter.add(piece, scorer.log_probabilities(piece), None)
    return meter.quality().nll
