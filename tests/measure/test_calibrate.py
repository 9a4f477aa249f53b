"""`headrace.calibrate` on a tiny model."""

from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import RequestError
from headrace.measure.calibrate import Calibration
from headrace.measure.drafters import BatchSpeed, Drafter, MeasuredDrafter
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.measure.drafters.ROUNDS", 1)
    monkeypatch.setattr("headrace.measure.drafters.BATCHES", (1, 3))


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    path: Path = write_gguf()
    return str(path)


def test_calibrate_compares_layers_and_drafters(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.measure.calibrate.MIN_SPEEDUP", 0.0)
    calibration = headrace.calibrate(
        model, draft_model=model, layers=[1], prompt="hello", tokens=24, max_depth=2, threads=1
    )
    (first,) = calibration.drafts
    assert (first.name, first.layers) == ("1 of 2 layers", 1)
    assert len(first.costs.target) == 3 and first.costs.draft > 0

    tree, same, layers = calibration.drafters
    assert [each.drafter.name for each in (tree, same, layers)] == [
        "suffix tree",
        model,
        "1 of 2 layers",
    ]
    assert same.acceptance == (1.0, 1.0) and same.draft_seconds > 0
    assert 0 <= layers.acceptance[1] <= layers.acceptance[0] < 1
    assert same.options["draft_model"] == model and same.options["draft_depth"] in (1, 2)
    for each in calibration.drafters:
        assert [speed.batch for speed in each.speeds] == [1, 3]
        assert all(len(speed.speedups) == 1 and speed.predicted > 0 for speed in each.speeds)

    facts = calibration.facts()
    suggestion = calibration.suggestion
    assert facts["suggestion"] == (suggestion.options if suggestion else None)
    assert facts["drafters"][1]["acceptance_by_depth"] == [1.0, 1.0]


def test_calibrate_without_layers_that_pay_tries_none(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.measure.calibrate.MIN_SPEEDUP", 99.0)
    calibration = headrace.calibrate(model, layers=[1], prompt="hello", tokens=16, threads=1)
    assert [each.drafter.name for each in calibration.drafters] == ["suffix tree"]


def measured(name: str, *speeds: tuple[float, ...]) -> MeasuredDrafter:
    return MeasuredDrafter(
        drafter=Drafter(name=name, options={"proposer": "draft_model", "draft_model": name}),
        acceptance=(0.8, 0.5, 0.2),
        draft_seconds=0.1,
        plain_seconds=1.0,
        depth=2,
        speeds=tuple(
            BatchSpeed(batch=batch, predicted=1.0, speedups=each)
            for batch, each in zip((1, 4, 16), speeds, strict=True)
        ),
    )


@pytest.mark.parametrize(
    ("drafters", "suggested"),
    [
        ([measured("a", (1.3, 1.1, 1.01), (1.0,), (0.97,))], "a"),
        ([measured("a", (1.3, 1.1, 0.99), (1.0,), (1.0,))], None),
        ([measured("a", (1.3,), (1.0, 1.1, 0.9), (1.0,))], "a"),
        ([measured("a", (1.3,), (1.2,), (0.96,))], None),
        ([measured("a", (1.0,), (1.2,), (1.2,))], None),
        ([measured("a", (2.0,), (0.9,), (1.0,)), measured("b", (1.1,), (1.0,), (1.0,))], "b"),
        ([measured("a", (1.2,), (1.0,), (1.0,)), measured("b", (1.5,), (1.0,), (1.0,))], "b"),
    ],
)
def test_calibrate_suggests_nothing_that_is_slower_at_a_batch(
    drafters: list[MeasuredDrafter], suggested: str | None
) -> None:
    found = Calibration(drafts=(), drafters=tuple(drafters))
    assert (found.suggestion and found.suggestion.drafter.name) == suggested
    assert drafters[0].tokens_per_step == 2.3 and drafters[0].cost == 0.1


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
