"""`headrace eval --frontier` on a tiny model: every form is measured, alone and as a draft."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from headrace.checkpoint.fingerprint import fingerprint
from headrace.checkpoint.load import open_checkpoint
from headrace.cli.eval_frontier import frontier_picture, print_frontier
from headrace.cli.main import main
from headrace.convert.quality import Quality
from headrace.errors import RequestError
from headrace.loader.calibration_file import write_calibration
from headrace.measure.frontier_points import FormScore, FormSpeed, Frontier, Point
from headrace.measure.frontier_run import measure_frontier
from headrace.planner.draft_gain import Costs
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture
from tests.planner.models import LLAMA_8B_CONFIG, write_config


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    path: Path = write_gguf()
    return str(path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("the quick brown fox jumps over the lazy dog " * 60)
    return path


def exit_file(model: str) -> str:
    """A calibration file with which every token leaves after the first layer."""
    file = Path(model).with_name("exit.json")
    checkpoint = open_checkpoint(Path(model))
    own = fingerprint(checkpoint, checkpoint.load_tokenizer())
    write_calibration(file, "early_exit", own, {"layers": 1, "min_margin": 0.0})
    return str(file)


def frontier(model: str, text: Path, **options: Any) -> Frontier:
    """By default without conversions and calibrations, which take seconds."""
    given = {"2:4 int4-g32": model, "6 of 8 experts": model, "exit within 10%": exit_file(model)}
    return measure_frontier(
        model,
        text=text,
        tokens=200,
        depth=200,
        quick=True,
        backend="cpu",
        threads=1,
        **{"files": given} | options,
    )


def test_frontier_measures_every_form(model: str, text: Path) -> None:
    steps: list[str] = []
    found = frontier(model, text, on_progress=lambda step, share: steps.append(step))
    points = {point.name: point for point in found.points}
    full = found.points[0]
    assert (full.name, full.loss, full.gain, full.draft) == (found.model, 0.0, 1.0, None)
    assert not found.left_out and found.depth == 200

    eight, three = points["int8-g32"], points["int3-g32"]
    assert 0 < eight.loss < three.loss
    assert full.step_bytes > eight.step_bytes > three.step_bytes
    assert eight.score and three.score and eight.draft and three.draft
    assert eight.score.acceptance and three.score.acceptance
    assert eight.score.acceptance >= three.score.acceptance
    half = points["1 of 2 layers"]
    assert half.loss > eight.loss and half.step_bytes < full.step_bytes
    window = points["window 50"]
    assert window.loss > 0 and window.draft is None and window.step_bytes < full.step_bytes
    best = points["top 1 blocks"]
    assert best.draft and best.step_bytes < full.step_bytes
    small = points["int4 KV"]
    assert small.loss > 0 and small.draft is None and small.step_bytes < full.step_bytes
    zeros, leaves = points["40% zeros"], points["exit within 10%"]
    assert zeros.draft and zeros.loss > 0
    assert zeros.step_bytes == full.step_bytes  # the tiny model's formats have no copies
    assert leaves.draft is None and leaves.loss > 0 and leaves.score
    assert leaves.score.early and leaves.score.early.share == 1
    # The measured times choose how many tokens leave: none on a busy machine.
    early, whole = leaves.score.early.step_bytes, leaves.score.step_bytes
    assert early < whole and early <= leaves.step_bytes <= whole
    assert all(point.decode > 0 and point.gain > 0 for point in found.points)
    assert any(step.startswith("form 1 of ") for step in steps)

    facts = json.loads(json.dumps(found.facts()))
    assert [row["name"] for row in facts["rows"]] == list(points)
    texts = {element.text for element in ElementTree.fromstring(frontier_picture(found)).iter()}
    assert points.keys() <= texts


def test_frontier_takes_named_formats_and_leaves_out_what_does_not_fit(
    model: str, text: Path
) -> None:
    found = frontier(model, text, formats=["int8-g64", "Q4_K"])
    assert "int8-g64" in [point.name for point in found.points]
    assert "Q4_K" in found.left_out and "multiple" in found.left_out["Q4_K"]


def test_frontier_takes_named_files(model: str, text: Path, tmp_path: Path) -> None:
    """A file under the name of a usual form saves its conversion; other models are refused."""
    other = str(write_config(tmp_path, LLAMA_8B_CONFIG))
    files = {"2:4 int4-g32": model, "itself": model, "another": other}
    files["exit within 10%"] = exit_file(model)
    found = frontier(model, text, formats=["int8-g32"], files=files)
    points = {point.name: point for point in found.points}
    assert points["2:4 int4-g32"].kind == "2:4" and points["itself"].kind == "file"
    itself = points["itself"]
    assert itself.loss == 0 and itself.draft and itself.score and itself.score.acceptance == 1
    assert "another" in found.left_out


def test_a_folder_keeps_results_and_files_for_the_next_run(
    model: str, text: Path, tmp_path: Path
) -> None:
    """Quality first and speed later give the whole table; nothing is measured twice."""
    keep = tmp_path / "kept"
    options: dict[str, Any] = {"formats": ["int8-g32"], "keep": keep}
    scored = frontier(model, text, parts=["quality"], **options)
    assert not scored.complete and all(point.score for point in scored.points)
    assert "not measured yet" in scored.advice
    print_frontier(scored)

    steps: list[str] = []
    whole = frontier(model, text, on_progress=lambda step, share: steps.append(step), **options)
    assert [point.score for point in whole.points] == [point.score for point in scored.points]
    assert len(whole.complete) == len(whole.points)
    assert not any("reference" in step or "activations" in step for step in steps)

    steps.clear()
    again = frontier(model, text, on_progress=lambda step, share: steps.append(step), **options)
    assert again.facts() == whole.facts() and not steps

    with pytest.raises(RequestError, match="results with depth 200, and this run has 100"):
        measure_frontier(model, text=text, tokens=200, depth=100, quick=True, keep=keep)
    (keep / "frontier.json").write_text("[]")
    with pytest.raises(RequestError, match="no table of an earlier run"):
        frontier(model, text, **options)


def test_frontier_refuses_a_lossy_option(model: str, text: Path) -> None:
    with pytest.raises(RequestError, match="leave out this one: attends to"):
        frontier(model, text, attention_window=8)


def point(name: str, gain: float, kl: float, draft: float) -> Point:
    """A form with these figures; `draft`: speed as a draft of 2 tokens, 0.8 accepted."""
    tokens = 1 + 0.8 + 0.8**2
    dear = [1.0] + [99.0] * 8
    dear[2] = tokens / draft
    return Point(
        name=name,
        kind="format",
        score=FormScore(
            weight_bytes=100,
            step_bytes=100,
            quality=Quality(tokens=10, nll=1.0, nll_error=0.1, kl=kl, agreement=0.9),
            acceptance=0.8,
            early=None,
        ),
        speed=FormSpeed(seconds=1 / gain, full_seconds=1.0, costs=Costs(dear, 0.0)),
        full_seconds=0.5,
    )


def test_speeds_of_forms_are_relative_to_the_same_full_model() -> None:
    """A form that was timed while the machine was busy is not slower for it."""
    quiet, busy = point("quiet", 1.25, 0.1, 1.0), point("busy", 1.25, 0.1, 1.0)
    assert busy.speed
    slow = FormSpeed(seconds=8.0, full_seconds=10.0, costs=busy.speed.costs)
    assert replace(busy, speed=slow).decode == quiet.decode == 2.5


@pytest.mark.parametrize(
    ("forms", "advice"),
    [
        ([("a", 1.5, 0.01, 0.9)], "a decodes 1.50 times as fast for a KL of 0.0100 nats."),
        (
            [("a", 1.5, 0.03, 0.9), ("b", 1.0, 0.0, 1.2)],
            "b as an exact draft gives 1.20 times the speed (2 tokens deep) and changes no token.",
        ),
        (
            [("a", 1.5, 0.03, 0.9), ("b", 1.04, 0.0, 1.02)],
            "No form pays here: a, the fastest, has a KL of 0.030 nats, and b, the best draft, "
            "gives 1.02 times the speed with 80% of its tokens accepted.",
        ),
        ([], "No form pays here: none could be made."),
    ],
)
def test_advice_names_forms_that_pay(
    forms: list[tuple[str, float, float, float]],
    advice: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    points = (point("full", 1.0, 0.0, 1.0), *(point(*form) for form in forms))
    found = Frontier(model="m", depth=8, tokens=10, points=points, left_out={"c": "it has no c"})
    assert found.advice == advice
    print_frontier(found)
    shown = capsys.readouterr().out
    assert advice in shown and "c is left out: it has no c" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--depth", "64"], "--depth needs --frontier"),
        (["--quick"], "--quick needs --frontier"),
        (["--form", "a=b"], "--form needs --frontier"),
        (["--keep", "a"], "--keep needs --frontier"),
        (["--frontier", "--only", "speed"], "--only measures a part of a table"),
        (["--form", "a"], "'a' is not NAME=FILE"),
        (["--svg", "x.svg"], "--svg needs --sweep or --frontier"),
        (["--frontier", "--sweep"], "--sweep does not belong to --frontier"),
        (["--frontier", "--by-layer"], "--by-layer does not belong to --frontier"),
    ],
)
def test_flags_of_other_evaluations_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "smollm2", *flags]) == 2
    assert message in capsys.readouterr().err
