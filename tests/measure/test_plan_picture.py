"""Pictures of a plan: words are apart, and bars and points have their sizes and places."""

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace.cli.main import main
from headrace.measure.batch_curve import batch_curve
from headrace.measure.batch_picture import batch_svg
from headrace.measure.plan import Plan, plan
from headrace.measure.plan_picture import memory_parts, plan_svg, roofline_phases
from headrace.planner.memory_picture import MemoryPart, memory_svg
from headrace.planner.steps import decode_step
from tests.measure.test_picture_layout import SVG, check_words, rect, words
from tests.planner.models import LLAMA_8B_CONFIG, write_config


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    config = LLAMA_8B_CONFIG | {"num_hidden_layers": 8}
    model = str(write_config(tmp_path_factory.mktemp("model"), config))
    return plan(model, on="l4", batch=24, prompt=2000, output=200)


@pytest.mark.parametrize("memory", [24, 9])
def test_the_memory_bar_is_to_scale(memory: int) -> None:
    parts = [MemoryPart("weights", 8), MemoryPart("KV", 3), MemoryPart("runtime", 1)]
    root = ElementTree.fromstring(memory_svg("Memory", "of a device", parts, memory))
    bars = [rect(r) for r in root.iter(f"{SVG}rect") if r.get("class") == "part"]
    check_words(root, bars)
    total = max(12, memory)
    widths = [8, 3, 1, 12] if memory == 24 else [8, 3, 1]
    assert [bar[2] - bar[0] for bar in bars] == pytest.approx(
        [884 * width / total for width in widths], abs=0.11
    )
    for left, right in pairwise(bars):
        assert left[2] == pytest.approx(right[0], abs=0.11)
    names = [text for _, text, _ in words(root)]
    assert ("free" in names) == (memory == 24) and ("memory" in names) == (memory == 9)


def test_the_memory_of_a_plan(found: Plan) -> None:
    parts = {part.name: part.bytes for part in memory_parts(found)}
    assert parts["weights"] == found.fit.weights
    assert parts["KV"] == 24 * found.fit.kv_per_sequence


def test_a_curve_has_the_times_of_the_plan(found: Plan) -> None:
    curve = batch_curve(found)
    times = {point.batch: point for point in curve.points}
    assert times[24].per_token == found.per_token
    assert times[24].tokens_per_second == pytest.approx(found.tokens_per_second)
    assert [point.fits for point in curve.points] == [
        point.batch <= found.fit.sequences for point in curve.points
    ]
    assert curve.knee
    before, at = (
        found.timer.seconds(decode_step(found.workload.depth, batch, found.kv_bytes))
        for batch in (curve.knee - 1, curve.knee)
    )
    assert before < 2 * times[1].per_token <= at
    assert times[curve.knee].per_token == at


def test_the_curve_is_drawn_to_scale(found: Plan) -> None:
    curve = batch_curve(found)
    root = ElementTree.fromstring(batch_svg("Batches", "of a model", curve))
    check_words(root)
    circles = [c for c in root.iter(f"{SVG}circle") if c.get("class") == "point"]
    places = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in circles]
    assert len(places) == len(curve.points)
    (x0, y0), (x1, y1) = places[0], places[-1]
    assert (x0, x1) == (76.0, 960.0)
    first, last = curve.points[0].per_token, curve.points[-1].per_token
    for point, (_, y) in zip(curve.points, places, strict=True):
        share = (point.per_token - first) / (last - first)
        assert y == pytest.approx(y0 + share * (y1 - y0), abs=0.2)
    (knee,) = (e for e in root.iter(f"{SVG}line") if e.get("class") == "knee")
    at = places[[point.batch for point in curve.points].index(curve.knee or 0)]
    assert float(knee.attrib["x1"]) == at[0]


def test_the_roofline_has_the_times_of_the_plan(found: Plan) -> None:
    prompt, alone, batch = roofline_phases(found)
    assert [phase.phase.seqs for phase in (prompt, alone, batch)] == [1, 1, 24]
    depth = found.workload.depth
    assert batch.wall == pytest.approx(found.timer.seconds(decode_step(depth, 24, found.kv_bytes)))
    assert alone.wall < batch.wall < prompt.wall
    for phase in (prompt, alone, batch):
        assert phase.seconds == pytest.approx(phase.wall) and phase.floor < phase.wall


def test_three_pictures_in_a_file(
    found: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ElementTree.fromstring(plan_svg(found))
    inner = root.findall(f"{SVG}svg")
    tops = [float(part.attrib["y"]) for part in inner]
    ends = [top + float(part.attrib["height"]) for top, part in zip(tops, inner, strict=True)]
    assert tops == [0, *ends[:-1]] and float(root.attrib["height"]) == ends[-1]
    for part in inner:
        check_words(part)

    model = str(write_config(tmp_path, LLAMA_8B_CONFIG | {"num_hidden_layers": 2}))
    file = tmp_path / "plan.svg"
    assert main(["plan", model, "--on", "l4", "--sweep", "--svg", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "Knee, at which a step takes twice" in printed and str(file) in printed
    assert len(ElementTree.parse(file).getroot().findall(f"{SVG}svg")) == 3
    assert main(["plan", model, "--on", "l4", "--svg", str(tmp_path / "no/plan.svg")]) == 2
