"""`headrace.calibrate` on a tiny model."""

from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import RequestError
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    path: Path = write_gguf()
    return str(path)


def test_calibrate_measures_layers_and_a_draft_model(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.measure.calibrate.MIN_SPEEDUP", 0.0)
    calibration = headrace.calibrate(
        model, draft_model=model, layers=[1], prompt="hello", tokens=24, max_depth=2, threads=1
    )
    same, first = calibration.drafts
    assert (same.name, same.layers, same.acceptance) == (model, None, 1.0)
    assert (first.name, first.layers) == ("1 of 2 layers", 1)
    assert len(first.costs.target) == 3 and first.costs.draft > 0
    assert calibration.best in (same, first)
    trial = calibration.trial
    assert trial is not None and len(trial.speedups) == 3 and trial.tokens_per_step >= 1
    assert trial.options == calibration.best.engine_options() | {
        "draft_depth": calibration.best.best.depth
    }
    facts = calibration.facts()
    pays = trial.speed > 1  # depends on the machine
    assert facts["suggestion"] == (calibration.best.name if pays else None)
    assert facts["trial"]["speed"] == trial.speed


def test_calibrate_without_a_speedup_makes_no_trial(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.measure.calibrate.MIN_SPEEDUP", 99.0)
    calibration = headrace.calibrate(model, layers=[1], prompt="hello", tokens=16, threads=1)
    assert calibration.trial is None and calibration.facts()["suggestion"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [2]}, "layers 2 is not below the 2 layers of this model; use 1 to 1"),
        ({"tokens": 300}, "the model's ends at 256"),
        ({"max_depth": 0}, "max_depth"),
        ({"threads": -1}, "threads"),
    ],
)
def test_calibrate_refuses(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        headrace.calibrate(model, **options)
