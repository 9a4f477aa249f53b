"""The search for layers that draft: it leaves out layers that cost little acceptance."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.backend import compile_program
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.config import KvConfig
from headrace.measure.layer_search import layer_bytes, search_layers
from headrace.measure.progress import ignore_progress
from headrace.measure.text_meter import CalibrationText, TextMeter
from headrace.model import trace_model
from tests.checkpoint.conftest import write_tiny_gguf
from tests.tiny import tiny_model


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    monkeypatch.setattr("tests.checkpoint.conftest.SHAPE", SHAPE)
    return open_checkpoint(write_tiny_gguf(tmp_path / "tiny.gguf"))


SHAPE = {"dim": 64, "layers": 8, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96}


@pytest.mark.parametrize("useless", [(0, 3, 6), (7, 1)])
def test_layers_without_worth_go_first(checkpoint: Checkpoint, useless: tuple[int, ...]) -> None:
    worth = {layer: 0.0 if layer in useless else 0.1 + 0.001 * layer for layer in range(8)}
    asked: list[tuple[int, ...]] = []

    def acceptance(layers: Sequence[int]) -> float:
        asked.append(tuple(layers))
        return 1 - sum(worth[layer] for layer in range(8) if layer not in layers)

    sets = search_layers(checkpoint, acceptance, ignore_progress)
    assert [len(layers) for layers in sets] == [7, 6, 5, 4, 3, 2]
    expected = set(range(8)) - set(useless)
    assert set(sets[len(useless) - 1]) == expected
    assert sets[-1] == tuple(sorted(sorted(expected, key=lambda layer: -worth[layer])[:2]))
    assert all(layers == tuple(sorted(layers)) for layers in asked)


def test_bytes_of_a_layer_are_its_weights(checkpoint: Checkpoint) -> None:
    nbytes = layer_bytes(checkpoint)
    assert set(nbytes) == set(range(8)) and len(set(nbytes.values())) == 1
    matrices = (64 * 64 * 2 + 32 * 64 * 2 + 3 * 96 * 64 + 2 * 64) * 4
    assert nbytes[0] == matrices


def test_acceptance_is_of_chains_over_the_kv_of_the_model() -> None:
    """A self-draft continues from the model's KV, so a chain of one reads no KV of drafts."""
    spec, tensors = tiny_model(3, layers=3)
    kv = KvConfig((4,), 32, "f32")
    target = compile_program("cpu", trace_model(spec, tensors), tensors, kv, 1)
    meter = TextMeter(target, CalibrationText([5, 6, 7], 40, 2), 32)
    same = target.attach(trace_model(spec, tensors), tensors)
    assert meter.acceptance(same, 0, 40) == 1

    short = target.attach(trace_model(spec.with_layers((0, 2)), tensors), tensors)
    found = meter.acceptance(short, 7, 40)
    assert meter.acceptance(same, 0, 40) == 1  # the model's KV is whole again
    assert found == meter.acceptance(short, 7, 40) < 1
    right = np.round(found * 33)
    assert abs(found * 33 - right) < 1e-9
