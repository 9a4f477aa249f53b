"""Calibration of early exits: the bound holds, and files of other models are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.cli.main import main
from headrace.errors import HeadraceError
from headrace.measure.early_exit import (
    ExitRows,
    calibrate_early_exit,
    choose_exit,
    exit_on,
    largest_share,
    most_events,
)
from headrace.model.spec import EarlyExit
from tests.checkpoint.conftest import write_tiny_gguf

OPTIONS: dict[str, Any] = {"max_model_len": 128, "kv_blocks": 8}


def made_rows(rng: np.random.Generator, tokens: int, skill: float) -> ExitRows:
    """Tokens whose early prediction is right with a probability that grows with its margin."""
    margin = rng.random(tokens).astype(np.float32)
    agrees = rng.random(tokens) < 1 - (1 - margin) ** skill / 2
    zeros = np.zeros(tokens, np.float32)
    return ExitRows(
        margin=margin,
        agrees=agrees,
        nll=zeros + 2,
        nll_full=zeros + 1,
        kl=zeros + 0.5,
        piece=np.arange(tokens) // 5,
    )


@pytest.mark.parametrize("bound", [0.01, 0.05, 0.2])
def test_the_bound_holds_with_the_stated_probability(bound: float) -> None:
    """Of 100 calibrations at most about a tenth may exceed the bound on a large sample."""
    rng = np.random.default_rng(3)
    world = {depth: made_rows(rng, 60_000, skill) for depth, skill in ((4, 1.0), (6, 2.0))}
    violations, found = 0, 0
    for _ in range(100):
        sample = np.zeros(60_000, bool)
        sample[rng.choice(60_000, 1500, replace=False)] = True
        chosen = choose_exit({d: rows.take(sample) for d, rows in world.items()}, 8, bound, 0.1)
        if chosen:
            found += 1
            violations += exit_on(world[chosen.num_layers], chosen, 8).disagreement > bound
    assert found > 75 and violations <= 18  # 10 expected at most; more than 18 has a chance of 1 %


def test_a_safe_exit_saves_what_it_can() -> None:
    rows = made_rows(np.random.default_rng(0), 4000, 2.0)
    strict, loose = (choose_exit({6: rows}, 8, bound, 0.05) for bound in (0.02, 0.2))
    assert strict and loose and strict.min_margin > loose.min_margin
    assert choose_exit({6: rows}, 8, 0.0, 0.05) is None
    assert choose_exit({6: rows.take(np.arange(4000) < 10)}, 8, 0.05, 0.05) is None
    measured = exit_on(rows, EarlyExit(6, 0.75), 8)
    assert measured.exits == pytest.approx(0.25, abs=0.02)
    assert measured.layers_saved == measured.exits / 4
    assert measured.kl == pytest.approx(measured.exits / 2)
    assert measured.nll == pytest.approx(1 + measured.exits)


@pytest.mark.parametrize(
    ("trials", "share", "error", "most"),
    [
        (10, 0.1, 0.3, -1),  # no event at all has 0.9^10 = 0.35
        (10, 0.1, 0.36, 0),
        (3, 0.5, 0.51, 1),
        (3, 0.5, 0.49, 0),
        (298, 0.01, 0.05, -1),
        (299, 0.01, 0.05, 0),
        (100, 0.0, 0.5, -1),
        (5, 1.0, 0.5, 4),
    ],
)
def test_the_most_events_that_show_a_bound(
    trials: int, share: float, error: float, most: int
) -> None:
    assert most_events(trials, share, error) == most


def test_pieces_that_differ_weaken_the_bound() -> None:
    """The t interval of four pieces by hand, and equal pieces without spread."""
    sizes = np.array([100, 100, 100, 100])
    found = largest_share(np.array([0.0, 2.0, 4.0, 2.0]), sizes, 0.05)
    # Share 0.02, standard error sqrt(8 / 3 * 4) / 400, and t = 2.353 with 3 degrees of freedom.
    assert found == pytest.approx(0.02 + 2.353 * np.sqrt(32 / 3) / 400, rel=0.01)
    assert largest_share(np.full(4, 2.0), sizes, 0.05) == 0.02
    assert largest_share(np.array([0.0]), sizes[:1], 0.05) == np.inf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "target.gguf")


def test_calibrate_writes_a_file_that_runs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens of the mode are the same with drafts and without."""
    file = model.with_name("exit.json")
    words = ("--early-exit", "0.9", "--tokens", "4096", "--output", str(file))
    assert main(["calibrate", str(model), *words]) == 0
    assert "after 1 of 2 layers, if the best" in capsys.readouterr().out
    facts = json.loads(file.read_text())
    assert (facts["kind"], facts["layers"]) == ("early_exit", 1)
    assert facts["measured"]["disagreement"] <= 0.9 and facts["price"]["kl"] > 0

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens = {}
    for proposer in ("off", "ngram", "self_draft", "auto"):
        with LLM(str(model), early_exit=str(file), proposer=proposer, **OPTIONS) as llm:
            result = llm.generate(["hello", "he"], params)
            tokens[proposer] = [r.outputs[0].token_ids for r in result]
            if proposer == "self_draft":
                stats = llm.stats()
                assert stats.proposer_failures == 0
    assert tokens["off"] == tokens["ngram"] == tokens["self_draft"] == tokens["auto"]


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
def test_unsuited_files_are_refused(model: Path, change: Any, message: str) -> None:
    file = model.with_name("exit.json")
    if isinstance(change, dict):
        calibrate_early_exit(str(model), 0.9, tokens=4096, threads=1).write(file)
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    elif change:
        file.write_text(change)
    with pytest.raises(HeadraceError) as error:
        LLM(str(model), early_exit=str(file), **OPTIONS)
    assert message in str(error.value) and "early_exit" in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "768"), "and a calibration needs 16: some fit, some choose and some"),
        (("--tokens", "4096"), "no exit keeps 0.0% disagreement with probability 95%"),
        (("--layers", "1"), "--early-exit reads a text without drafts; leave out: layers"),
        (("--early-exit", "2"), "'2' is not a number from 0 to 1"),
    ],
)
def test_calibrate_refuses(
    model: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = model.with_name("exit.json")
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
    model: Path, options: dict[str, Any], message: str
) -> None:
    file = model.with_name("exit.json")
    calibrate_early_exit(str(model), 0.9, tokens=4096, threads=1).write(file)
    with pytest.raises(HeadraceError, match=message):
        LLM(str(model), early_exit=str(file), **options, **OPTIONS)
