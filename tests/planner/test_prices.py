"""Kept prices of lossy modes."""

from pathlib import Path
from typing import Any

import pytest

from headrace.planner.prices import Price, keep_price, kept_price, parse_price

PRICE = Price(text="wiki", tokens=1024, nll=2.25, nll_full=2.0, kl=0.125)
FACTS: dict[str, Any] = {"text": "wiki", "tokens": 1024, "nll": 2.25, "nll_full": 2, "kl": 0.125}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return tmp_path


def test_price_is_kept_by_model_and_mode() -> None:
    assert kept_price("model", "mode") is None
    assert keep_price("model", "mode", PRICE)
    assert kept_price("model", "mode") == PRICE
    assert kept_price("model", "other") is None and kept_price("other", "mode") is None
    assert PRICE.line == "price: KL 0.1250 nats, NLL +0.2500 (1,024 tokens of wiki)"


def test_kept_prices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.planner.prices._MAX_KEPT", 3)
    for number in range(5):
        keep_price("model", f"mode {number}", PRICE)
    kept = [number for number in range(5) if kept_price("model", f"mode {number}")]
    assert kept == [2, 3, 4]


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10_000, '{"model / mode": {"kl": 1}}'])
def test_stale_or_foreign_file_is_a_miss(cache: Path, text: str) -> None:
    (cache / "prices.json").write_text(text)
    assert kept_price("model", "mode") is None
    assert keep_price("model", "mode", PRICE) and kept_price("model", "mode") == PRICE


def test_price_without_a_folder_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(cache / "file"))
    assert not keep_price("model", "mode", PRICE) and kept_price("model", "mode") is None


@pytest.mark.parametrize(
    "change",
    [{"text": 3}, {"tokens": 0}, {"tokens": 1.5}, {"kl": "0"}, {"nll": float("nan")}, {"kl": True}],
    ids=str,
)
def test_malformed_price_is_none(change: dict[str, Any]) -> None:
    assert parse_price(FACTS) == PRICE
    assert parse_price(FACTS | change) is None and parse_price([]) is None
