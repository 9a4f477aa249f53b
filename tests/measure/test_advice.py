"""Advice against an exhaustive loop over the same configurations, and goals that none meets."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.errors import MemoryLimitError, RequestError
from headrace.measure.advice import find_advice
from headrace.measure.advice_report import commands
from headrace.measure.configurations import Candidate, Search, SearchSpace
from headrace.measure.goal import Goal, parse_goal
from headrace.parallel.mesh import Mesh
from tests.planner.models import LLAMA_8B_CONFIG, LLAMA_70B_CONFIG, write_config

GRID = SearchSpace(
    on=("l4", "h100-sxm"),
    meshes=(Mesh(), Mesh(tensor=2)),
    formats=("BF16", "Q4_K"),
    chunks=(64, 1024),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of the width of 8B with two layers."""
    config = LLAMA_8B_CONFIG | {"num_hidden_layers": 2}
    return str(write_config(tmp_path_factory.mktemp("model"), config))


def exhaustive(model: str, goal: Goal, space: SearchSpace, replicas: range) -> list[Candidate]:
    """All configurations that meet a goal, the best first."""
    search = Search(model, space)
    found = [
        one
        for setup in search.setups()
        for number in replicas
        for one in search.candidates(goal, setup, number)
        if not one.misses(goal, space.budget)
    ]
    return sorted(found, key=lambda one: one.rank(goal))


@pytest.mark.parametrize(
    "text, space",
    [
        ("ttft<60ms tpot<2ms users=6 prompt=2k output=64", GRID),
        ("ttft<60ms tpot<2ms users=6 prompt=2k output=64", replace(GRID, formats=("BF16",))),
        ("tpot<900us users=5 prompt=300", GRID),
        ("throughput>3k users=4 prompt=300", replace(GRID, budget=9.0)),
        ("cost<0.4 ttft<30ms users=6", GRID),
    ],
)
def test_the_cheapest_is_that_of_an_exhaustive_loop(
    model: str, text: str, space: SearchSpace
) -> None:
    goal = parse_goal(text)
    found, all_met = find_advice(model, goal, space), exhaustive(model, goal, space, range(1, 7))
    assert found.best and all_met
    assert found.best.rank(goal) == pytest.approx(all_met[0].rank(goal))
    best = found.best.setup.place
    others = [
        one
        for one in all_met
        if (one.setup.place.name, one.setup.place.mesh.ranks) != (best.name, best.mesh.ranks)
    ]
    if others:
        assert found.runner_up and found.runner_up.price == pytest.approx(others[0].price)


@pytest.mark.parametrize("best", ["throughput", "ttft", "tpot", "cost"])
def test_the_best_of_a_metric_is_that_of_an_exhaustive_loop(model: str, best: str) -> None:
    goal = parse_goal(f"{best} users=6 prompt=1k")
    found = find_advice(model, goal, GRID)
    assert found.best
    assert found.best.rank(goal) == exhaustive(model, goal, GRID, range(1, 2))[0].rank(goal)


def test_a_budget_buys_replicas(model: str) -> None:
    goal = parse_goal("throughput users=12 prompt=1k")
    space = replace(GRID, on=("l4",), meshes=(Mesh(),), budget=2.4)
    found = find_advice(model, goal, space).best
    assert found and found.replicas == 3 and found.price == pytest.approx(3 * 0.78)
    assert found.engine.max_num_seqs <= 4


def test_loss_decides_between_equal_prices(model: str) -> None:
    """At the price of one device the model's own format comes first, if it meets the goal."""
    space = replace(GRID, on=("h100-sxm",), meshes=(Mesh(),))
    easy = find_advice(model, parse_goal("tpot<50ms"), space)
    assert easy.best and (easy.best.setup.format, easy.best.setup.kv_dtype) == ("BF16", "bf16")
    assert easy.own is None
    tight = replace(parse_goal("users=1"), tpot=0.95 * easy.best.value("tpot"))
    lossy = find_advice(model, tight, space).best
    assert lossy and lossy.setup.format != "BF16" and lossy.loss.high > 0
    both = find_advice(model, tight, replace(space, meshes=(Mesh(), Mesh(tensor=2))))
    assert both.best == lossy and both.own
    assert both.own.setup.format == "BF16" and both.own.price == 2 * (lossy.price or 0)


def test_an_impossible_goal_says_what_is_missing(model: str) -> None:
    space = replace(GRID, on=("l4",), meshes=(Mesh(),))
    goal = parse_goal("tpot<1us users=2")
    found = find_advice(model, goal, space)
    assert found.best is None and found.nearest
    assert {*found.nearest.misses(goal, None)} == {"tpot"}
    needed = found.changes["tpot"]
    assert find_advice(model, replace(goal, tpot=needed * 1.001), space).best
    assert find_advice(model, replace(goal, tpot=needed * 0.999), space).best is None


def test_a_budget_that_is_too_small(model: str) -> None:
    space = replace(GRID, on=("l4",), meshes=(Mesh(),), budget=1.0)
    goal = parse_goal("users=8 prompt=2k output=64")
    fastest = find_advice(model, replace(goal, best="ttft"), space).best
    assert fastest and fastest.replicas == 1
    goal = replace(goal, ttft=0.95 * fastest.value("ttft"))
    found = find_advice(model, goal, space)
    assert found.best is None
    changes = found.changes
    assert find_advice(model, goal, replace(space, budget=changes["budget"] + 0.01)).best
    users = int(changes["users"])
    assert 0 < users < 8
    assert find_advice(model, replace(goal, users=users), space).best
    assert find_advice(model, replace(goal, users=users + 1), space).best is None


@pytest.mark.parametrize("machine", ["l4", "zen4-server"])
@pytest.mark.parametrize("is_measured", [True, False])
def test_kv_without_a_measured_speed_is_not_faster(
    model: str, machine: str, is_measured: bool
) -> None:
    """A table without attention over int8 KV, such as an old calibration: it only saves memory."""
    space = SearchSpace(on=(machine,), meshes=(Mesh(),), formats=("BF16",), chunks=(64,))
    goal, search = parse_goal("tpot users=8 prompt=4k"), Search(model, space)
    (place,) = search.places
    if not is_measured:
        table = place.reaches.table
        attention = {bits: reach for bits, reach in table["attention"].items() if bits >= 16}
        reaches = replace(place.reaches, table={**table, "attention": attention})
        search.places = [replace(place, reaches=reaches)]
    plain, int8 = (
        next(search.candidates(goal, setup, 1, only_first=True)) for setup in search.setups()
    )
    assert (plain.setup.kv_dtype, int8.setup.kv_dtype) == ("bf16", "int8")
    assert (int8.value("tpot") != plain.value("tpot")) is is_measured
    assert int8.fit.kv_per_sequence < plain.fit.kv_per_sequence


def test_weights_that_fit_nowhere(tmp_path: Path) -> None:
    large = str(write_config(tmp_path, LLAMA_70B_CONFIG))
    space = SearchSpace(on=("l4",), meshes=(Mesh(),))
    with pytest.raises(MemoryLimitError, match=r"no machine holds the weights .* 1 x NVIDIA L4"):
        find_advice(large, parse_goal("users=1"), space)


@pytest.mark.parametrize(
    "goal, space, message",
    [
        ("context=999k", GRID, "context=1,022,976, above the model's 131,072 tokens"),
        ("users=1", replace(GRID, on=("l5",)), "machine 'l5' is unknown"),
        ("users=1", replace(GRID, formats=("Q9",)), "format 'Q9' is unknown"),
        ("users=1", replace(GRID, on=("mi300x",), budget=9.0), "'mi300x' has no known price"),
    ],
)
def test_one_clear_error(model: str, goal: str, space: SearchSpace, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        find_advice(model, parse_goal(goal), space)


def test_commands(model: str) -> None:
    space = replace(
        GRID,
        on=("l4",),
        meshes=(Mesh(tensor=2),),
        formats=("Q4_K",),
        draft_depth=2,
        draft_acceptance=0.8,
    )
    goal = parse_goal("tpot users=4 context=2k")
    found = find_advice(model, goal, space)
    assert found.best and found.best.engine.draft_depth == 2
    convert, serve = commands("org/Model-8B", found, found.best)
    assert convert == "headrace convert org/Model-8B Model-8B-Q4_K.gguf --to Q4_K_S"
    assert serve.startswith("headrace serve Model-8B-Q4_K.gguf --kv-dtype ")
    assert " --max-model-len 2048 " in serve and serve.endswith("-tp 2 --proposer auto")


def test_a_goal_in_a_lossy_mode(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The mode's memory and time count, and the command has its options."""
    goal = parse_goal("tpot users=4 prompt=16k")
    space = replace(GRID, on=("l4",), meshes=(Mesh(),), formats=("BF16",), chunks=(64,))
    full = find_advice(model, goal, space)
    mode = find_advice(model, goal, replace(space, modes={"attention_window": 1024}))
    assert full.best and mode.best
    assert mode.best.fit.kv_per_sequence < full.best.fit.kv_per_sequence
    assert mode.best.value("tpot") < full.best.value("tpot")
    (serve,) = commands("a-model", mode, mode.best)
    assert serve.endswith("--attention-window 1024 --attention-sinks 4")

    words = ["plan", model, "--goal", "users=1", "--on", "l4", "--attention-window", "64"]
    assert main(words) == 0
    assert "Lossy: attends to " in capsys.readouterr().out


def test_the_table_and_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", model, "--on", "l4,rtx-4090", "-tp", "1", "-pp", "1", "--goal"]
    assert main([*words, "ttft<1s users=4"]) == 0
    printed = capsys.readouterr().out
    for text in ("runner-up", "1 x rtx-4090", "$ headrace serve", "4 users at a time"):
        assert text in printed
    assert main([*words, "ttft<1s users=4", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["met"] and facts["best"]["commands"][0].startswith("headrace serve")
    assert main([*words, "ttft<1us users=4"]) == 1
    printed = capsys.readouterr().out
    assert "No configuration" in printed and "met if one of these changes alone" in printed
    assert main(["plan", model, "--budget", "2"]) == 2
    assert "--budget is for a goal" in capsys.readouterr().err
