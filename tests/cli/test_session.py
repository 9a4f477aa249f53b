"""The closing line of made-up results, on a machine with known rates."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.backend import lower_program
from headrace.cli.session import Session
from headrace.config import EngineConfig
from headrace.model import trace_model
from headrace.outputs import CompletionOutput, DraftStats, RequestOutput, Timing
from headrace.planner.decode_steps import decode_seconds, decode_steps
from headrace.planner.hardware import Machine
from headrace.program.kv import number_bytes
from tests.tiny import tiny_model

SPEC, TENSORS = tiny_model(0, format="Q4_0", dim=64)
CONFIG = EngineConfig(backend="cpu")
MACHINE = Machine("Zen 4", "avx512", 2, 36e9, {"int8": 940e9, "bf16": 470e9, "f32": 235e9})
DRAFTS = {"suffix": DraftStats(10, 60, 50)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The known machine is in `now`; `after` is the machine after another measurement."""
    known = SimpleNamespace(now=MACHINE, after=MACHINE)
    monkeypatch.setattr(
        "headrace.planner.hardware.this_machine", lambda threads, backend="cpu": known.now
    )
    monkeypatch.setattr(
        "headrace.planner.hardware.measure",
        lambda threads, backend="cpu": setattr(known, "now", known.after),
    )
    return known


def answer(num_out: int, decode: float, **more: Any) -> RequestOutput:
    output = CompletionOutput(0, "", [1] * num_out, None, None, "stop", None)
    return RequestOutput(
        "0", None, [1] * 20, None, [output], True, Timing(0.0, 0.01, decode, 0.0), **more
    )


def closing_line(
    monkeypatch: pytest.MonkeyPatch, result: RequestOutput, config: EngineConfig = CONFIG
) -> str:
    checkpoint = SimpleNamespace(spec=SPEC, tensors=TENSORS)
    monkeypatch.setattr(
        "headrace.cli.session.load_model",
        lambda model, config: (
            SimpleNamespace(config=config, lossy=config.lossy),
            None,
            None,
            checkpoint,
        ),
    )
    session = Session("tiny", config)
    session.result = result
    return session.closing_line()


def least(result: RequestOutput, machine: Machine = MACHINE) -> float:
    program = lower_program("cpu", trace_model(SPEC, TENSORS), TENSORS)
    return decode_seconds(
        program, machine, decode_steps(result, number_bytes(program.kv_groups, CONFIG.kv_format))
    )


@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_percentage_is_the_share_of_the_limit(
    monkeypatch: pytest.MonkeyPatch,
    machine: SimpleNamespace,
    drafts: dict[str, DraftStats],
    share: float,
) -> None:
    seconds = least(answer(101, 1.0, drafts=drafts))
    line = closing_line(monkeypatch, answer(101, seconds / share, drafts=drafts))
    speed = 100 * share / seconds
    accepted = " · 50 accepted from drafts" if drafts else ""
    assert (
        line
        == f"[20 in, 2,000 tok/s · 101 out, {speed:,.0f} tok/s · limit {speed / share:,.0f} "
        f"tok/s, {share:.0%}".replace("%", " %")
        + f"{accepted}]"
    )


def test_drafts_raise_the_limit(monkeypatch: pytest.MonkeyPatch, machine: SimpleNamespace) -> None:
    limits = []
    for drafts in ({}, DRAFTS):
        found = re.search(
            r"limit ([\d,]+)", closing_line(monkeypatch, answer(101, 1.0, drafts=drafts))
        )
        assert found
        limits.append(int(found[1].replace(",", "")))
    assert 1.5 * limits[0] < limits[1] <= 2 * limits[0]  # at most 100 tokens in 50 steps


def test_beaten_limit_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, machine: SimpleNamespace
) -> None:
    machine.now = Machine(
        "Zen 4", "avx512", 2, 12e9, {kind: rate / 3 for kind, rate in MACHINE.rates.items()}
    )
    for drafts in ({}, DRAFTS):
        result = answer(101, 2 * least(answer(101, 1.0, drafts=drafts)), drafts=drafts)
        assert ", 50 %" in closing_line(monkeypatch, result)


def test_unbeaten_limit_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, machine: SimpleNamespace
) -> None:
    machine.after = None
    assert ", 99 %" in closing_line(monkeypatch, answer(101, least(answer(101, 1.0)) / 0.99))


def test_response_of_one_step_has_no_speed(
    monkeypatch: pytest.MonkeyPatch, machine: SimpleNamespace
) -> None:
    assert closing_line(monkeypatch, answer(1, 0.0)) == "[20 in, 2,000 tok/s · 1 out]"
    quoted = answer(5, 1e-6, drafts={"suffix": DraftStats(1, 4, 4)})
    assert (
        closing_line(monkeypatch, quoted) == "[20 in, 2,000 tok/s · 5 out · 4 accepted from drafts]"
    )


def test_cached_tokens_take_no_time(
    monkeypatch: pytest.MonkeyPatch, machine: SimpleNamespace
) -> None:
    assert (
        closing_line(monkeypatch, answer(1, 0.0, cached_tokens=15))
        == "[20 in, 15 cached, 500 tok/s · 1 out]"
    )
    assert (
        closing_line(monkeypatch, answer(1, 0.0, cached_tokens=20)) == "[20 in, 20 cached · 1 out]"
    )


def test_closing_line_names_lossy_options(monkeypatch: pytest.MonkeyPatch) -> None:
    line = closing_line(
        monkeypatch, answer(1, 0.0), EngineConfig(backend="cpu", attention_window=512)
    )
    assert (
        line == "[20 in, 2,000 tok/s · 1 out · lossy: attends to the first 4 and the last 512 "
        "tokens only]"
    )
