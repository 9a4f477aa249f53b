import json
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.errors import RequestError
from headrace.measure import plan_check
from headrace.measure.plan_check import Point, check_plan
from headrace.planner.hardware import Machine

HERE = Machine("a test", "avx2", 2, 50e9, {"int8": 2e12, "bf16": 1e12, "f32": 5e11})
TINY: dict[str, Any] = {
    "shapes": {
        "tiny": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 512,
            "max_position_embeddings": 256,
        }
    },
    "cases": [
        {
            "shape": "tiny",
            "format": "Q4_0",
            "steps": [[[2, 40, 1]], [[2, 40, 1], [1, 0, 16]]],
            "requests": [[2, 16, 8]],
        }
    ],
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_check, "_read_points", lambda: TINY)
    monkeypatch.setattr(plan_check, "_SECONDS", 0.0)
    monkeypatch.setattr("headrace.planner.hardware.measure", lambda *args: HERE)
    monkeypatch.setattr("headrace.planner.hardware.bandwidth_now", lambda *args: HERE.bandwidth)


def test_each_point_is_predicted_and_measured(tiny: None) -> None:
    found = check_plan()
    assert [(point.kind, point.name) for point in found.points] == [
        ("step", "2 x 1 at 40"),
        ("step", "2 x 1 at 40 + 1 x 16 at 0"),
        ("first token", "2 x 16 + 8"),
        ("time per token", "2 x 16 + 8"),
    ]
    assert all(point.predicted > 0 and point.measured > 0 for point in found.points)
    assert Point("m", "f", "step", "1 x 1 at 0", 3.0, 2.0, 1e9).error == 0.5


def test_a_lossy_mode_is_predicted_and_measured(tiny: None) -> None:
    full, mode = check_plan(), check_plan(attention_window=8, attention_sinks=0)
    assert [point.name for point in mode.points] == [point.name for point in full.points]
    pairs = zip(full.points, mode.points, strict=True)
    assert all(of_mode.predicted < of_full.predicted for of_full, of_mode in pairs)
    with pytest.raises(RequestError, match="early_exit is a file for one model"):
        check_plan(early_exit="exit.json")


def test_the_command_prints_errors(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--check"]) == 0
    assert "of 2" in capsys.readouterr().out
    assert main(["plan", "--check", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["errors"].keys() == {"step", "first token", "time per token"}


def test_the_points_are_sixty_steps() -> None:
    record = plan_check._read_points()
    assert sum(len(case["steps"]) for case in record["cases"]) == 60
    assert {case["shape"] for case in record["cases"]} == record["shapes"].keys()
    assert {case["format"] for case in record["cases"]} == {"Q4_0", "Q4_1", "Q8_0", "BF16"}


@pytest.mark.parametrize(
    "words, message",
    [
        (["plan", "--check", "--on", "l4", "--batch", "2"], "leave out --on, --batch"),
        (["calibrate", "--machine", "smollm2"], "leave out: model"),
        (["calibrate", "--machine", "--backend", "cuda"], "leave out: backend"),
    ],
)
def test_options_without_an_effect_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
