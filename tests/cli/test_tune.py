"""`headrace tune` in the interpreter, on a tiny model; and an engine that reads its tiles."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.backend.cuda.kernels import tiles
from headrace.cli.main import main
from headrace.llm import LLM
from headrace.sampling_params import SamplingParams
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture


@pytest.fixture
def model(write_gguf: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:  # noqa: F811
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    path: Path = write_gguf()
    return str(path)


@pytest.fixture(autouse=True)
def no_tiles() -> Any:
    yield
    tiles.use_tiles({})


def tokens_of(model: str) -> list[int]:
    with LLM(model, backend="cuda", kv_blocks=16) as llm:
        (output,) = llm.generate(
            [{"prompt_token_ids": [3, 5, 7]}], SamplingParams(temperature=0.0, max_tokens=4)
        )
        return list(output.outputs[0].token_ids)


def test_tune_writes_tiles_that_engines_read(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tokens_of(model)
    assert not tiles._table

    assert main(["tune", model, "--rows", "1,9", "--json"]) == 0
    printed, progress = capsys.readouterr()
    report = json.loads(printed)
    file = Path(report["file"])
    assert file.parent == tmp_path / "cache" / "tiles" and report["left"] == 0
    weights = {product["weight"] for product in report["products"]}
    assert report["tiles"] == len(report["products"]) == 2 * len(weights)
    assert {product["max_rows"] for product in report["products"]} == {1, 16}
    assert f"{report['tiles']} of {report['tiles']}: " in progress
    assert all(product["microseconds"] > 0 for product in report["products"])

    # Tiles that differ from the rule's, since a host's clock may find none faster.
    table = json.loads(file.read_text())
    for tile in table["tiles"]:
        tile["block_n"], tile["num_stages"] = 128, 2
    file.write_text(json.dumps(table))
    assert tokens_of(model) == before
    assert {tile.block_n for tile in tiles._table.values()} == {128}


def test_tune_stops_in_time_and_goes_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "tiles.json")
    words = ["tune", model, "--rows", "1", "--max-seconds", "0", "--out", out]
    assert main([*words, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["tiles"] == len(first["products"]) == 1 and first["left"] > 0
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "run the command again" in text and f"{out} has 2 tiles." in text
    assert "tile before" in text and "us now" in text
    assert not (tmp_path / "cache").exists()


def test_tune_needs_a_gpu(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(
        "headrace.planner.gpu.find_gpu", lambda *root: (None, "no driver: use the cpu backend")
    )
    assert main(["tune", model]) == 2
    assert "backend 'cuda' cannot run here: no driver" in capsys.readouterr().err
