"""`headrace calibrate` on a tiny model whose last layer has no effect."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.backend import lower_program
from headrace.checkpoint.load import open_checkpoint
from headrace.cli.main import main
from headrace.measure.calibrate import Calibration, MeasuredDraft
from headrace.measure.drafters import BatchSpeed, Drafter, MeasuredDrafter
from headrace.model import trace_model
from headrace.planner.draft_gain import Costs
from headrace.planner.fit import RUNTIME_BYTES
from tests.checkpoint.conftest import SHAPE, write_gguf  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.measure.drafters.ROUNDS", 1)
    monkeypatch.setattr("headrace.measure.drafters.BATCHES", (1, 3))


@pytest.fixture
def model(write_gguf: Any) -> Path:  # noqa: F811
    """Three layers: the second changes the rows a little, the third leaves them unchanged."""
    rng, dim, ffn = np.random.default_rng(0), SHAPE["dim"], SHAPE["ffn"]
    kv = SHAPE["kv_heads"] * SHAPE["head_dim"]
    shapes = {
        "attn_norm": (dim,),
        "ffn_norm": (dim,),
        "attn_q": (dim, dim),
        "attn_k": (kv, dim),
        "attn_v": (kv, dim),
    }
    shapes |= {
        "attn_output": (dim, dim),
        "ffn_gate": (ffn, dim),
        "ffn_up": (ffn, dim),
        "ffn_down": (dim, ffn),
    }
    added = {
        f"blk.2.{name}.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in ("attn_output", "ffn_down"):
        added[f"blk.2.{name}.weight"] *= 0
    path: Path = write_gguf({"llama.block_count": 3}, added)
    return path


NOTHING_PAYS = "None of these saves time here"
QUICK = ("--tokens", "48", "--depth", "3", "--prompt", "hello")


def test_calibrate_finds_layers_without_effect(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(model), "--layers", "1,2", "--json", *QUICK]) == 0
    report = json.loads(capsys.readouterr().out)
    one, two = report["layers"]
    assert (one["name"], two["name"]) == ("1 of 3 layers", "2 of 3 layers")
    assert one["acceptance"] < two["acceptance"] == 1
    assert (
        two["tokens"] == two["depth"] + 1
        and len(two["target_seconds"]) == 4
        and two["draft_seconds"] > 0
    )
    assert report["drafters"][0]["name"] == "suffix tree"


def test_calibrate_with_drafters(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--draft-model", str(model), "--layers", "1", *QUICK)
    assert main(["calibrate", str(model), *words]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith(str(model)))
    assert row.split()[1:4] == ["1.00", "1.00", "1.00"]
    assert "suffix tree" in out and "measured at 3" in out
    assert "Suggestion" in out or NOTHING_PAYS in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--layers", "0"), "is not a list of whole numbers from 1"),
        (
            ("--layers", "3", "--tokens", "16"),
            "layers 3 is not below the 3 layers of this model; use 1 to 2",
        ),
        (("--tokens", "4"), "--tokens: '4' is not a whole number from 16"),
        (("--tokens", "4000"), "the model's ends at 256"),
    ],
)
def test_calibrate_errors(
    model: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["calibrate", str(model), *words])
    assert code == 2 and message in capsys.readouterr().err


def test_calibrate_beyond_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = open_checkpoint(model)
    program = lower_program(
        "cpu", trace_model(checkpoint.spec, checkpoint.tensors), checkpoint.tensors
    )
    weights, (group,) = program.weight_bytes, program.kv_groups
    enough = RUNTIME_BYTES + weights + 2 * group.block_bytes("bf16", 32)  # of 54 tokens
    monkeypatch.setattr("headrace.loader.memory.available_memory", lambda: enough - 1)
    assert main(["calibrate", str(model), "--layers", "1", *QUICK]) == 4
    assert f"{weights:,} bytes of weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("speedups", "last"),
    [
        ((1.3, 1.1, 1.01), "Suggestion: proposer='self_draft', draft_layers=2, draft_depth=3"),
        ((1.3, 1.1, 0.9), NOTHING_PAYS),
        ((1.0, 1.0, 1.0), NOTHING_PAYS),
    ],
)
def test_calibrate_suggests_only_what_was_faster(
    speedups: tuple[float, ...],
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A draft that should pay by its costs, and was slower when it was timed, is not suggested."""
    draft = MeasuredDraft(
        name="2 of 3 layers", layers=2, acceptance=0.9, costs=Costs((1.0, 1.1, 1.2, 1.3), 0.1)
    )
    timed = MeasuredDrafter(
        drafter=Drafter(name=draft.name, options=draft.engine_options()),
        acceptance=(0.9, 0.8, 0.7),
        draft_seconds=0.1,
        plain_seconds=1.0,
        depth=3,
        speeds=tuple(
            BatchSpeed(batch=batch, predicted=1.2, speedups=speedups) for batch in (1, 4, 16)
        ),
    )
    found = Calibration(drafts=(draft,), drafters=(timed,))
    monkeypatch.setattr("headrace.measure.calibrate.calibrate", lambda *args, **kwargs: found)
    assert main(["calibrate", "model"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(last)

    assert main(["calibrate", "model", "--json"]) == 0
    suggestion = json.loads(capsys.readouterr().out)["suggestion"]
    assert (suggestion is None) == (last == NOTHING_PAYS)
