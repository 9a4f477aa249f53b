"""Prices of lossy modes and of lossy files: measured losses, kept for the runs after it."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from headrace.planner import hardware
from headrace.record import frozen
from headrace.whole_file import replace_file

_FILE = "prices.json"
_MAX_KEPT = 500
_MAX_NAME = 120
"""Prices in the file; a new one takes the place of the oldest."""


@frozen(kw_only=True)
class Price:
    """Loss of a lossy mode, or of pruned weights, against the full model on a text, in nats."""

    text: str
    """Name of the text."""
    tokens: int
    nll: float
    """Mean negative log-likelihood of a token in the mode."""
    nll_full: float
    """The same of the full model."""
    kl: float
    """Mean divergence of the mode's next-token distributions from the full model's."""

    @property
    def line(self) -> str:
        return (
            f"price: KL {self.kl:.4f} nats, NLL {self.nll - self.nll_full:+.4f} "
            f"({self.tokens:,} tokens of {self.text})"
        )


def parse_price(facts: object) -> Price | None:
    """Parse the `price` of a file; None if it is missing or malformed."""
    values = facts if isinstance(facts, Mapping) else {}
    text, tokens = values.get("text"), values.get("tokens")
    losses = {name: values.get(name) for name in ("nll", "nll_full", "kl")}
    finite = {
        name: float(loss)
        for name, loss in losses.items()
        if isinstance(loss, int | float) and not isinstance(loss, bool) and math.isfinite(loss)
    }
    if not isinstance(text, str) or type(tokens) is not int or tokens < 1 or losses != finite:
        return None
    name = "".join(letter if letter.isprintable() else " " for letter in text[:_MAX_NAME])
    return Price(text=name, tokens=tokens, **finite)


def kept_price(model: str, mode: str) -> Price | None:
    """The price that a measurement of this machine's user kept; None without one.

    `model` is the fingerprint of the model, `mode` a key of its lossy options.
    """
    return parse_price(_load().get(_key(model, mode)))


def keep_price(model: str, mode: str, price: Price) -> bool:
    """Keep a price in place of the mode's last one; False if the folder cannot be written."""
    entries = _load()
    entries.pop(_key(model, mode), None)
    entries = dict(list(entries.items())[-(_MAX_KEPT - 1) :]) | {_key(model, mode): asdict(price)}
    file = hardware.cache_file(_FILE)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(entries, indent=1))
        return True
    return False


def _key(model: str, mode: str) -> str:
    return f"{model} / {mode}"


def _load() -> dict[str, Any]:
    try:
        found = json.loads(hardware.cache_file(_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
