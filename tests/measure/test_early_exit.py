"""Calibration of early exits: the bound holds, and files of other models are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.cli.main import main
from headrace.errors import HeadraceError
from headrace.measure.early_exit import (
    calibrate_early_exit,
    choose_depth,
    exit_on,
    least_margin,
)
from headrace.measure.exit_reader import ExitRows
from headrace.measure.risk_bound import fewest_draws, is_below
from headrace.model.spec import EarlyExit
from tests.checkpoint.conftest import write_tiny_gguf

OPTIONS: dict[str, Any] = {"max_model_len": 128, "kv_blocks": 8}


def made_rows(rng: np.random.Generator, windows: int, skill: float) -> ExitRows:
    """Windows of ten tokens, whose early prediction is right more often with a large margin.

    A window is of one topic: all of its tokens are easy, or all are hard.
    """
    shape = windows, 10
    margin = rng.random(shape).astype(np.float32)
    hard = rng.random((windows, 1)) ** 8
    agrees = rng.random(shape) < 1 - 2 * hard * (1 - margin) ** skill
    zeros = np.zeros(shape, np.float32)
    return ExitRows(margin=margin, agrees=agrees, nll=zeros + 2, nll_full=zeros + 1, kl=zeros + 0.5)


@pytest.mark.parametrize("bound", [0.02, 0.05, 0.2])
def test_the_bound_holds_with_the_stated_probability(bound: float) -> None:
    """Of 60 calibrations at most a tenth exceeds the bound on all windows."""
    rng = np.random.default_rng(3)
    world = made_rows(rng, 20_000, 1.0)
    violations, found = 0, 0
    for _ in range(60):
        sample = np.zeros(20_000, bool)
        sample[rng.choice(20_000, 400, replace=False)] = True
        margin = least_margin(world.take(sample), bound, 0.1)
        if margin is not None and margin < 1:
            found += 1
            violations += exit_on(world, EarlyExit(6, margin), 8).disagreement > bound
    assert found > 45 and violations <= 6


def test_a_safe_exit_saves_what_it_can() -> None:
    rows = made_rows(np.random.default_rng(0), 400, 2.0)
    strict, loose = (least_margin(rows, bound, 0.05) for bound in (0.02, 0.1))
    assert strict is not None and loose is not None and strict > loose
    assert least_margin(rows, 0.0, 0.05) is None
    assert least_margin(rows.take(np.arange(400) < 10), 0.05, 0.05) is None
    measured = exit_on(rows, EarlyExit(6, 0.75), 8)
    assert measured.tokens == 4000 and measured.exits == pytest.approx(0.25, abs=0.02)
    assert measured.layers_saved == measured.exits / 4
    assert measured.kl == pytest.approx(measured.exits / 2)
    assert measured.nll == pytest.approx(1 + measured.exits)


def test_the_exit_with_the_most_right_tokens_is_chosen() -> None:
    """A low exit saves more layers of a token, unless it spends the bound on wrong ones."""
    rng = np.random.default_rng(0)
    poor, good = made_rows(rng, 400, 0.2), made_rows(rng, 400, 4.0)
    assert choose_depth({4: good, 6: good}, 8, 0.05) == 4
    assert choose_depth({4: poor, 6: good}, 8, 0.01) == 6
    never = replace(good, agrees=np.zeros_like(good.agrees))
    assert choose_depth({4: never}, 8, 0.05) is None
    assert choose_depth({4: good}, 8, -0.01) is None


@pytest.mark.parametrize(
    ("draws", "limit", "error", "fewest"),
    [(299, 0.01, 0.05, 302), (59, 0.05, 0.05, 62), (0, 0.1, 0.05, 32), (3, 1.0, 0.1, 4)],
)
def test_the_fewest_windows_that_show_a_bound(
    draws: int, limit: float, error: float, fewest: int
) -> None:
    assert fewest_draws(limit, error) == fewest > draws
    assert is_below(np.zeros(fewest), limit, error)
    assert not is_below(np.zeros(fewest - 1), limit, error)


def test_skewed_shares_seldom_pass() -> None:
    """Of 2,000 samples of rare bad windows at the limit, at most 5 % pass; a t test passes 9 %."""
    rng = np.random.default_rng(1)
    bad = (rng.random((2000, 400)) < 0.01).astype(np.float64)
    assert 0 < sum(is_below(shares, 0.01, 0.05) for shares in bad) <= 100
    assert not any(is_below(shares, 0.005, 0.05) for shares in bad)
    assert not is_below(np.array([1.0, 0.0]), 0.0, 0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "target.gguf")


@pytest.fixture(scope="module")
def calibrated(model: Path) -> str:
    """The content of a calibration file."""
    file = model.with_name("calibrated.json")
    calibrate_early_exit(str(model), 0.9, tokens=4096, threads=1).write(file)
    return file.read_text()


@pytest.fixture
def file(calibrated: str, tmp_path: Path) -> Path:
    file = tmp_path / "exit.json"
    file.write_text(calibrated)
    return file


def test_calibrate_writes_a_file_that_runs(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokens of the mode are the same with drafts and without."""
    file = tmp_path / "exit.json"
    words = ("--early-exit", "0.9", "--tokens", "4096", "--output", str(file))
    assert main(["calibrate", str(model), *words]) == 0
    assert "after 1 of 2 layers, if the best" in capsys.readouterr().out
    facts = json.loads(file.read_text())
    assert (facts["kind"], facts["layers"]) == ("early_exit", 1)
    assert facts["measured"]["disagreement"] <= 0.9 and facts["price"]["kl"] > 0

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens = {}
    for proposer in ("off", "suffix", "self_draft", "auto"):
        with LLM(str(model), early_exit=str(file), proposer=proposer, **OPTIONS) as llm:
            result = llm.generate(["hello", "he"], params)
            tokens[proposer] = [r.outputs[0].token_ids for r in result]
            if proposer == "self_draft":
                stats = llm.stats()
                assert stats.proposer_failures == 0
    assert tokens["off"] == tokens["suffix"] == tokens["self_draft"] == tokens["auto"]


def test_a_start_reads_the_file_once(
    model: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts of an engine share one reading, and a file that changed is read again."""
    read_text, readings = Path.read_text, []

    def counted(path: Path, **options: Any) -> str:
        readings.append(path)
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", counted)
    options = OPTIONS | {"early_exit": str(file), "proposer": "self_draft"}
    with LLM(str(model), **options) as llm:
        assert "price: KL" in repr(llm)
    assert readings.count(file) == 1

    facts = json.loads(file.read_text()) | {"price": None}
    file.write_text(json.dumps(facts))
    readings.clear()
    with LLM(str(model), **options) as llm:
        assert "price not measured" in repr(llm)
    assert readings.count(file) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sparsity"}, "has the kind 'sparsity', not 'early_exit'; make one with"),
        ({"version": 9}, "has version 9, and this Headrace reads version 1"),
        ({"model": "0"}, "was calibrated for another model or another number format of it"),
        ({"layers": 0}, "has layers 0, not a number of first layers"),
        ({"layers": 2}, "leaves after 2 layers, and the model has 2"),
        ({"min_margin": "x"}, "has min_margin 'x', not a difference of probabilities"),
        ({"min_margin": float("nan")}, "has min_margin nan"),
        ({"map": {"weight": "AAAA"}}, "has a map whose weight is not 8,192 bytes in base64"),
        ({"map": 5}, "has a map whose weight is not"),
        ("[1]", "has no kind, not 'early_exit'"),
        ("{", "is not JSON"),
        (None, "No such file or directory; make one with `headrace calibrate"),
    ],
)
def test_unsuited_files_are_refused(model: Path, file: Path, change: Any, message: str) -> None:
    if isinstance(change, dict):
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    elif change:
        file.write_text(change)
    else:
        file.unlink()
    with pytest.raises(HeadraceError) as error:
        LLM(str(model), early_exit=str(file), **OPTIONS)
    assert message in str(error.value) and "early_exit" in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--tokens", "768", "--early-exit", "0.05"),
            "4 windows of 32 tokens would test the exit, and a bound of 0.05 with an error "
            "probability of 0.05 needs 62: a text of about 5,654 tokens; use a longer text",
        ),
        (("--tokens", "16"), "0 windows of 32 tokens would test the exit"),
        (("--tokens", "4096"), "no exit keeps 0.0% disagreement with probability 95%"),
        (("--layers", "1"), "--early-exit reads a text without drafts; leave out: layers"),
        (("--early-exit", "2"), "'2' is not a number from 0 to 1"),
    ],
)
def test_calibrate_refuses(
    model: Path,
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "exit.json"
    code = main(["calibrate", str(model), "--early-exit", "0", "--output", str(file), *words])
    assert code == 2 and message in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_layers": 1, "proposer": "self_draft"}, "draft_layers is set, and with early_exit"),
        ({"pipeline_parallel_size": 2}, "early_exit needs all layers in one pipeline stage"),
    ],
)
def test_options_that_do_not_combine_are_refused(
    model: Path, file: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(HeadraceError, match=message):
        LLM(str(model), early_exit=str(file), **options, **OPTIONS)
