"""`headrace climb`: the rungs of a tiny model, their comparison, and the advice."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.cli.main import main
from headrace.errors import HeadraceError, MemoryLimitError, RequestError
from headrace.measure import climb as climbing
from headrace.measure import climb_files, climb_process, climb_work
from headrace.measure.climb import first_difference
from headrace.measure.climb_process import run_apart, run_command
from headrace.measure.climb_results import advise
from headrace.measure.climb_run import Measured, ShareCallback, Task, run_task
from headrace.measure.climb_rungs import Weights, float_rungs, format_rungs, lossy_rungs
from headrace.measure.climb_work import evenly
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture
from tests.measure.climbs import MACHINE, a_climb, a_step

NAMES = [
    "recompute",
    "KV cache",
    "fused kernels, threads",
    "static batch",
    "in-flight batch",
    "paging, prefix cache",
    "int8 weights",
    "W8A8",
    "int4 weights",
    "int8 activations",
    "16-bit KV",
    "8-bit KV",
    "drafts",
    "everything",
    "top blocks",
]
Run = Callable[[Task, ShareCallback], Measured]


@pytest.fixture
def model(write_gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """A model of 264 tokens with a context of 256, a known machine, and a cache of its own."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("headrace.planner.hardware.this_machine", lambda threads: MACHINE)
    monkeypatch.setattr(climbing, "_QUICK_SECONDS", 0.01)
    monkeypatch.setattr(climb_work, "_MAX_LENGTH", 128)
    return str(write_gguf())


def in_this_process(monkeypatch: pytest.MonkeyPatch, run: Run = run_task) -> None:
    """Run rungs and conversions here: a process takes half a second to start."""

    def convert(*words: str) -> None:
        if code := main(words):
            raise HeadraceError(f"exit code {code}")

    def round_trip(task: Task, on_share: ShareCallback) -> Measured:
        return Measured(**json.loads(json.dumps(vars(run(task, on_share)))))

    monkeypatch.setattr(climb_files, "run_command", convert)
    monkeypatch.setattr(climbing, "run_apart", round_trip)


def no_text(file: None, use: str) -> str:
    raise RequestError("this Python has no language reference")


class TestClimb:
    def test_all_rungs_of_a_model(
        self,
        model: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Tokens of one rung are changed, which the comparison must find."""

        def changed(task: Task, on_share: ShareCallback) -> Measured:
            measured = run_task(task, on_share)
            has_slots = task.options.get("max_num_seqs", 1) > 1
            if has_slots and "batching" not in task.options:
                measured.outputs[3][5] += 1
            return measured

        in_this_process(monkeypatch, changed)
        svg = tmp_path / "climb.svg"
        words = ["climb", model, "--quick", "--json", "--price", "0.5", "--svg", str(svg)]
        assert main([*words, "--threads", "1"]) == 1
        out, err = capsys.readouterr()
        facts = json.loads(out[out.index("{") :])

        rungs = {rung["rung"]: rung for rung in facts["rungs"]}
        assert list(rungs) == NAMES and not facts["left_out"]
        assert facts["work"]["requests"] == 16 and facts["work"]["output_tokens"] > 100
        for rung in rungs.values():
            assert rung["tokens_per_second"] > 0 and rung["peak_memory"] > 0
            assert rung["first_token"] > 0 and 0 < rung["share"] <= 1
            assert rung["dollars_per_million"] == pytest.approx(
                0.5 / 3600 * 1e6 / rung["tokens_per_second"]
            )
        differing = [name for name, rung in rungs.items() if rung["difference"]]
        assert differing == ["in-flight batch"] and "request 3, token 5" in err
        assert {name: rung["same_as"] for name, rung in rungs.items() if rung["same_as"]} == {
            "recompute": "KV cache",
            "static batch": "fused kernels, threads",
            "in-flight batch": "fused kernels, threads",
            "paging, prefix cache": "fused kernels, threads",
            "drafts": "16-bit KV",
            "everything": "8-bit KV",
        }
        assert rungs["recompute"]["share"] < rungs["static batch"]["share"] == 1

        weights = [rungs[name]["weight_bytes"] for name in ("recompute", "int8 weights")]
        assert weights[0] > 3 * weights[1] > 3 * rungs["int4 weights"]["weight_bytes"] > 0
        assert rungs["static batch"]["nll_rise"] == 0
        assert rungs["int8 weights"]["quality"]["kl"] < rungs["int4 weights"]["quality"]["kl"]
        assert facts["limit"] > 0 and facts["advice"]["rung"] in NAMES[5:]
        assert svg.read_text().startswith("<svg")
        assert not list((tmp_path / "cache" / "climb").iterdir())

    def test_rungs_that_do_not_fit_are_left_out_by_name(
        self, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        in_this_process(monkeypatch)
        monkeypatch.setattr(climb_files, "own_weights", lambda checkpoint: "own")
        monkeypatch.setattr(climb_files, "available_memory", lambda: 1000)
        monkeypatch.setitem(climb_files._TARGETS, "w8a8", ((), ()))
        monkeypatch.setattr(climbing, "own_weights", lambda checkpoint: "own")
        monkeypatch.setattr(climbing, "read_text", no_text)
        steps: list[str] = []
        found = headrace.climb(
            model, quick=True, threads=1, on_step=lambda step: steps.append(step.rung.name)
        )
        assert [name for name in NAMES if name in found.left_out] == [*NAMES[:6], "W8A8"]
        assert "float32 weights need" in found.left_out["recompute"]
        assert steps == ["the file's weights", *NAMES[6:7], *NAMES[8:]]
        assert not found.differences
        assert all(step.nll_rise is None and not step.quality for step in found.steps)
        assert found.factor(found.steps[0], "paging, prefix cache") is None

    def test_a_model_that_runs_nowhere(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(task: Task, on_share: ShareCallback) -> Measured:
            raise MemoryLimitError("too large")

        in_this_process(monkeypatch, fail)
        with pytest.raises(HeadraceError, match="no rung could run; KV cache: too large"):
            headrace.climb(model, quick=True)

    def test_a_model_that_is_unknown(self) -> None:
        assert main(["climb", "no-such-model"]) == 3


def a_task(path: str, **changes: Any) -> Task:
    task = Task(
        mode="cache",
        path=path,
        options={"kv_dtype": "f32", "activations": "f32"},
        items=[([5, 6, 7], 4), ([9, 8], 2)],
        probes=[[3, 4]],
        length=16,
        seconds=10.0,
        runs=3,
    )
    return replace(task, **changes)


def test_a_rung_in_another_process(model: str) -> None:
    shares: list[float] = []
    apart, here = run_apart(a_task(model), shares.append), run_task(a_task(model), shares.append)
    assert apart.outputs == here.outputs and sorted(apart.done) == [0, 1]
    assert shares.count(1.0) == 2
    with pytest.raises(HeadraceError, match="'nowhere'"):
        run_apart(a_task("nowhere"), shares.append)


def test_a_fast_batch_runs_three_times(model: str) -> None:
    options = {"kv_dtype": "f32", "activations": "f32", "kv_blocks": 8, "threads": 1}
    fast = run_task(a_task(model, mode="batch", options=options), lambda share: None)
    assert len(fast.samples) == 3 and sorted(fast.samples)[1] == fast.seconds
    slow = a_task(model, mode="batch", options=options, seconds=0.0)
    assert len(run_task(slow, lambda share: None).samples) == 1


def test_the_message_of_a_command_in_another_process() -> None:
    with pytest.raises(HeadraceError, match=r"^unknown command 'clime'"):
        run_command("clime")


def test_a_process_that_is_killed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb_process, "_MODULE", "tests.measure.killed")
    with pytest.raises(MemoryLimitError, match="memory is short"):
        run_apart(a_task(model), lambda share: None)


@pytest.mark.parametrize(
    ("found", "expected", "difference"),
    [
        ({0: {0: 5, 1: 6}}, {0: [5, 6]}, ""),
        ({0: {1: 6}, 7: {0: 1}}, {0: [5, 6, 7]}, ""),
        ({2: {0: 5, 1: 7}}, {2: [5, 6]}, "request 2, token 1: 7 and not 6"),
        ({0: {0: 5, 1: 6}}, {0: [5]}, "request 0, token 1: 6 and not None"),
    ],
)
def test_first_difference(
    found: dict[int, dict[int, int]], expected: dict[int, list[int]], difference: str
) -> None:
    assert first_difference(found, expected) == difference


@pytest.mark.parametrize("number", [0, 1, 2, 7, 48])
def test_every_beginning_is_spread_evenly(number: int) -> None:
    order = evenly(number)
    assert sorted(order) == list(range(number))
    for count in range(1, number + 1):
        assert abs(sum(order[:count]) / count / number - 0.5) <= 1 / count + 1 / number


def test_rungs_add_to_rungs_before_them() -> None:
    cases: list[list[Weights]] = [["int8", "w8a8", "int4", "sparse"], ["own", "int8"], []]
    for known in cases:
        rungs = float_rungs() + format_rungs(known, float_rungs()[-1].name) + lossy_rungs(known, 9)
        assert next(rung.name for rung in rungs if rung.is_lossy) == "top blocks"
        assert ("2:4 weights" in [rung.name for rung in rungs]) == ("sparse" in known)
        names = [rung.name for rung in rungs]
        assert len(set(names)) == len(names)
        assert all(rung.base in names[:i] for i, rung in enumerate(rungs) if i)


@pytest.mark.parametrize(
    ("speeds", "rises", "chosen", "words"),
    [
        ((1, 10, 20), (None, 0.0, 0.01), 2, "20 times the rung first"),
        ((1, 10, 20), (None, 0.0, 0.5), 1, "third is faster, 20 tokens/s, but has an NLL +0.5000"),
        ((1, 10, 20), (None, None, None), 2, "not measured"),
        ((30, 10, 20), (None, 0.0, 0.0), 2, "50% of the machine's limit"),
    ],
)
def test_advice(
    speeds: tuple[float, ...], rises: tuple[float | None, ...], chosen: int, words: str
) -> None:
    names = ("first", "second", "third")
    modes = ("cache", "batch", "batch")
    steps = [
        a_step(name, speed, mode=mode, nll_rise=rise)
        for name, speed, mode, rise in zip(names, speeds, modes, rises, strict=True)
    ]
    advice = advise("my model", Path("my model.gguf"), steps, 40.0, threads=2)
    assert advice.rung == names[chosen] and words in advice.sentence
    assert advice.command == "headrace serve 'my model' --kv-dtype int8 --threads 2"


def test_advice_takes_the_fewest_options_of_equal_speeds() -> None:
    plain = replace(a_step("plain", 98.0), rung=replace(a_step("plain", 1.0).rung, options={}))
    assert advise("m", Path("m.gguf"), [plain, a_step("small", 100.0)], 200.0).rung == "plain"
    assert advise("m", Path("m.gguf"), [plain, a_step("small", 110.0)], 200.0).rung == "small"


def test_advice_for_a_converted_file() -> None:
    made = a_step("int4", 5.0, convert=("--to", "Q4_K_M"), format="Q4_K_M")
    advice = advise("hf:a/b", Path("/cache/B.gguf"), [made], 10.0)
    assert advice.command == (
        "headrace convert hf:a/b b-q4-k-m.gguf --to Q4_K_M && "
        "headrace serve b-q4-k-m.gguf --kv-dtype int8"
    )


def test_facts_of_a_climb_are_json() -> None:
    facts = a_climb().facts(1.0)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["rungs"][1]["of_first"] == 10 and facts["rungs"][0]["of_base"] is None


def test_folders_of_killed_climbs_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    old = tmp_path / "climb" / "4194304"  # above the largest process id
    old.mkdir(parents=True)
    other = tmp_path / "climb" / str(os.getppid())
    other.mkdir()
    with climb_files.climb_folder() as folder:
        assert folder.is_dir() and other.is_dir() and not old.exists()
    assert not folder.exists()


def test_embedding_models_are_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = climbing.open_checkpoint(Path(model))
    headless = replace(opened, spec=replace(opened.spec, has_head=False))
    monkeypatch.setattr(climbing, "open_checkpoint", lambda path: headless)
    with pytest.raises(RequestError, match="has no head"):
        headrace.climb(model)
