import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace.cli.main import main
from headrace.errors import RequestError
from headrace.simulator.picture import read_measured, sweep_svg
from headrace.simulator.simulate import Deployment, deploy, load_trace
from headrace.simulator.sweep import Sweep, sweep, sweep_facts
from tests.planner.models import LLAMA_8B_CONFIG, write_config

TRACE = "lognormal:requests=150,prompt=200,output=12"
MEASURED = {
    "kind": "throughput",
    "tokens_per_second": 1000.0,
    "first_token": 0.05,
    "first_token_p95": 0.1,
    "between_tokens": 0.01,
    "between_tokens_p95": None,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = LLAMA_8B_CONFIG | {"max_position_embeddings": 2048, "num_hidden_layers": 2}
    return str(write_config(tmp_path_factory.mktemp("llama"), config))


@pytest.fixture(scope="module")
def deployment(llama: str) -> Deployment:
    return deploy(llama, on="l4", max_num_seqs=8)


@pytest.fixture(scope="module")
def found(deployment: Deployment) -> Sweep:
    return sweep(deployment, load_trace(TRACE, 0), (0.1, 0.8, 3.0))


def test_throughput_rises_to_the_capacity_and_latency_beyond(found: Sweep) -> None:
    light, busy, full = (point.report for point in found.points)
    assert light.requests_per_second == pytest.approx(found.points[0].rate, rel=0.15)
    assert full.requests_per_second < 0.7 * found.points[2].rate
    assert light.output_tokens_per_second < busy.output_tokens_per_second
    assert full.output_tokens_per_second > 0.95 * busy.output_tokens_per_second
    assert full.latencies.first_token.p50 > 3 * busy.latencies.first_token.p50
    assert found.knee is found.points[1]


def test_facts(found: Sweep) -> None:
    facts = sweep_facts(found)
    assert facts["knee"] == found.points[1].rate
    assert [point["rate"] for point in facts["points"]] == [point.rate for point in found.points]
    json.dumps(facts)


def test_picture_has_curves_and_measured_points(found: Sweep, tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    file.write_text(json.dumps({"kind": "latency"}) + "\n" + json.dumps(MEASURED) + "\n")
    measured = read_measured(file)
    svg = sweep_svg("a model & a machine", found, measured)
    ElementTree.fromstring(svg)
    assert "a model &amp; a machine" in svg and "measured" in svg
    dots, rings = re.findall('r="2.5"', svg), re.findall('r="4.5"', svg)
    assert len(dots) == 4 * len(found.points)
    assert len(rings) == 1 + 3  # in the legend, and the figures that are measured
    assert "measured" not in sweep_svg("", found)
    for number in re.findall(r'c[xy]="([\d.]+)"', svg):
        assert 0 <= float(number) <= 900


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"kind": "latency"}', '{"between_tokens": 1}'])
def test_a_file_without_measurements_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bench.jsonl"
    file.write_text(text)
    with pytest.raises(RequestError, match="no measured throughput"):
        read_measured(file)


def test_a_trace_of_refused_requests_is_an_error(deployment: Deployment) -> None:
    with pytest.raises(RequestError, match="every request of the trace is refused"):
        sweep(deployment, load_trace("lognormal:requests=2,prompt=3000,spread=0", 0))


def test_command(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "load.svg"
    trace = "lognormal:requests=20,prompt=50,output=5"
    words = ["simulate", trace, "--model", llama, "--on", "l4", "--sweep"]
    assert main([*words, "--svg", str(picture)]) == 0
    text = capsys.readouterr().out
    assert text.count("knee") == 1 and "TTFT p50, ms" in text and picture.exists()
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["points"]) == 10


@pytest.mark.parametrize(
    "words, part",
    [
        (["--svg", "a.svg"], "--svg is for --sweep"),
        (["--sweep", "--measured", "a"], "--measured is for --svg"),
        (["--sweep", "--svg", "/nowhere/a.svg"], "cannot be written"),
    ],
)
def test_errors(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "chat", *words]) == 2
    assert part in capsys.readouterr().err
