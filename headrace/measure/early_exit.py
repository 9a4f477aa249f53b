"""Calibrates an early exit: where tokens may leave, and how clear they must be there.

CALM (Schuster et al. 2022) chooses the least strict threshold whose disagreement with the full
model is bounded with a stated probability, by learn-then-test (Angelopoulos et al. 2021). The text
is cut into windows. Windows drawn at random test the thresholds, because tokens of one window
resemble each other and are no independent draws.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.backend_traits import BackendName
from headrace.checkpoint.fingerprint import fingerprint
from headrace.config import EngineConfig
from headrace.convert.texts import calibration_pieces
from headrace.errors import RequestError
from headrace.loader.backend_choice import with_backend
from headrace.loader.calibration_file import write_calibration
from headrace.loader.early_exit import KIND
from headrace.loader.exit_map import ExitMap
from headrace.loader.load import open_files
from headrace.loader.options import engine_config
from headrace.measure.exit_reader import PIECE, WINDOW, ExitReader, ExitRows, windows_in
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.measure.risk_bound import fewest_draws, is_below
from headrace.model.spec import EarlyExit
from headrace.planner.prices import Price
from headrace.record import frozen
from headrace.validation import integer, number

TOKENS = 65_536
_MARGINS = np.linspace(1.0, 0.0, 201)
"""Thresholds in the order of their tests, which the text must not choose."""
_FITTING, _CHOOSING = 1 / 4, 1 / 16
"""Shares of pieces that fit maps and that choose an exit."""
_TESTING = 3 / 4
"""Share of windows of all other pieces that test the exit."""


@frozen(kw_only=True)
class Exit:
    """A chosen exit, with what it does on some tokens."""

    early_exit: EarlyExit
    num_layers: int
    """Of the model."""
    tokens: int
    exits: float
    """Share of tokens that leave early."""
    disagreement: float
    """Share of tokens that differ from the full model's."""
    nll: float
    nll_full: float
    kl: float

    @property
    def layers_saved(self) -> float:
        """Share of the layers' weights that no token waits for, if each is read once a token."""
        return self.exits * (1 - self.early_exit.num_layers / self.num_layers)


@frozen(kw_only=True)
class ExitCalibration:
    """The chosen exit on tokens that were not used to choose it; None if no exit is safe."""

    chosen: Exit | None
    max_disagreement: float
    error_probability: float
    exit_map: ExitMap | None
    fitting_tokens: int
    calibration_tokens: int
    text: str
    model: str
    """Fingerprint."""

    def facts(self) -> dict[str, Any]:
        """The content of the calibration file, without kind and model."""
        assert self.chosen and self.exit_map, "no exit was safe"
        price = Price(
            text=self.text,
            tokens=self.chosen.tokens,
            nll=self.chosen.nll,
            nll_full=self.chosen.nll_full,
            kl=self.chosen.kl,
        )
        return {
            "layers": self.chosen.early_exit.num_layers,
            "min_margin": self.chosen.early_exit.min_margin,
            "bound": {
                "disagreement": self.max_disagreement,
                "probability": 1 - self.error_probability,
            },
            "calibrated_on": {"text": self.text, "tokens": self.calibration_tokens},
            "measured": {
                "tokens": self.chosen.tokens,
                "exits": self.chosen.exits,
                "disagreement": self.chosen.disagreement,
                "layers_saved": self.chosen.layers_saved,
            },
            "price": vars(price),
            "map": self.exit_map.facts(),
        }

    def write(self, file: Path) -> None:
        """Write the calibration file. Raises RequestError."""
        write_calibration(file, KIND, self.model, self.facts())


def calibrate_early_exit(
    model: str,
    max_disagreement: float,
    *,
    error_probability: float = 0.05,
    text: Path | str | None = None,
    tokens: int = TOKENS,
    backend: BackendName = EngineConfig.backend,
    threads: int = EngineConfig.threads,
    on_progress: ProgressCallback = ignore_progress,
) -> ExitCalibration:
    """Choose the exit that saves the most layers within a bound.

    A quarter of the text's pieces fits a linear map for each exit, a sixteenth chooses the exit.
    Of the windows of all other pieces, three quarters, drawn at random, test thresholds, and a
    quarter measures the result.

    Args:
        max_disagreement: share of tokens that may differ from the full model's.
        error_probability: probability that the bound does not hold.
        text: a text file like those of your application; None: Python's language reference.
        tokens: tokens of the text in all.

    Raises RequestError for a bound that is not within 0 and 1, or a text that is too short.
    """
    number("max_disagreement", max_disagreement, 0.0, 1.0)
    number("error_probability", error_probability, 1e-9, 1.0)
    integer("tokens", tokens, 2, 2**22)
    config = engine_config({"backend": backend, "threads": threads})
    checkpoint = open_files(model, config)
    config = with_backend(config, checkpoint)
    num_layers = checkpoint.spec.num_layers
    if num_layers == 1:
        raise RequestError("the model has one layer, so no token can leave before the others")
    file = Path(text) if text else None
    rng = np.random.default_rng(0)
    parts = split_pieces(calibration_pieces(checkpoint, file, PIECE, tokens), rng)
    num_windows = sum(map(windows_in, parts.others))
    num_testing = int(_TESTING * num_windows)
    _check_windows(num_testing, max_disagreement, error_probability)

    reader = ExitReader(config, checkpoint, PIECE)
    chosen = None
    try:
        maps = reader.fit(parts.fitting, on_progress)
        choosing = reader.read(parts.choosing, maps, on_progress, "choosing an exit")
        limit = choosing_limit(num_testing, max_disagreement, error_probability)
        depth = choose_depth(choosing, num_layers, limit)
        if depth is not None:
            only = {depth: maps[depth]}
            rows = reader.read(parts.others, only, on_progress, "testing thresholds")[depth]
            tests = rng.permutation(num_windows) < num_testing
            margin = least_margin(rows.take(tests), max_disagreement, error_probability)
            if margin is not None:
                chosen = exit_on(rows.take(~tests), EarlyExit(depth, margin), num_layers)
    finally:
        reader.close()
    return ExitCalibration(
        chosen=chosen,
        max_disagreement=max_disagreement,
        error_probability=error_probability,
        exit_map=maps[chosen.early_exit.num_layers] if chosen else None,
        fitting_tokens=sum(map(len, parts.fitting)),
        calibration_tokens=num_testing * WINDOW,
        text=file.name if file else "Python's language reference",
        model=fingerprint(checkpoint, checkpoint.load_tokenizer()),
    )


@frozen
class Parts:
    """Pieces of a text by their use."""

    fitting: list[list[int]]
    choosing: list[list[int]]
    others: list[list[int]]


def split_pieces(pieces: Sequence[list[int]], rng: np.random.Generator) -> Parts:
    """Draw the pieces that fit maps and that choose an exit."""
    order = [pieces[i] for i in rng.permutation(len(pieces))]
    fitting = max(1, int(_FITTING * len(pieces)))
    choosing = fitting + max(1, int(_CHOOSING * len(pieces)))
    return Parts(order[:fitting], order[fitting:choosing], order[choosing:])


def _check_windows(num_testing: int, max_disagreement: float, error_probability: float) -> None:
    needed = 1  # of 0, which no number of windows shows
    if max_disagreement > 0:
        needed = max(1, fewest_draws(max_disagreement, error_probability))
    if num_testing < needed:
        share = _TESTING * (1 - _FITTING - _CHOOSING)
        length = math.ceil(needed / share / (PIECE // WINDOW - 2) + 1) * PIECE
        raise RequestError(
            f"{num_testing} windows of {WINDOW} tokens would test the exit, and a bound of "
            f"{max_disagreement:.3g} with an error probability of {error_probability:.3g} needs "
            f"{needed:,}: a text of about {length:,} tokens; use a longer text and more tokens, or "
            "a larger bound"
        )


def choosing_limit(num_testing: int, max_disagreement: float, error_probability: float) -> float:
    """The disagreement below which a number of windows passes the test, if all are alike."""
    return max_disagreement - math.log(1 / error_probability) / max(1, num_testing)


def choose_depth(
    rows: Mapping[int, ExitRows], num_layers: int, max_disagreement: float
) -> int | None:
    """Return the exit that leaves out the most layers for tokens that agree, or None.

    `rows` by depth are no part of a test. Tokens that disagree save layers, too, but a low exit
    would spend the whole bound on them.
    """
    best, saved = None, 0.0
    for depth, each in rows.items():
        margins = [m for m in _MARGINS.tolist() if each.disagreement(m).mean() <= max_disagreement]
        if not margins:
            continue
        agreeing = (each.margin >= np.float32(min(margins))) & each.agrees
        saving = float(np.mean(agreeing)) * (1 - depth / num_layers)
        if saving > saved:
            best, saved = depth, saving
    return best


def least_margin(rows: ExitRows, max_disagreement: float, error_probability: float) -> float | None:
    """Return the smallest margin that passes the test, or None.

    Thresholds are tested in a fixed sequence, from the strictest one down to the first that fails,
    so each has the whole error probability (Angelopoulos et al. 2021, section 2).
    """
    passed = None
    for margin in _MARGINS.tolist():
        if not is_below(rows.disagreement(margin), max_disagreement, error_probability):
            return passed
        passed = margin
    return passed


def exit_on(rows: ExitRows, early_exit: EarlyExit, num_layers: int) -> Exit:
    """Measure an exit on tokens."""
    leaves = rows.margin >= np.float32(early_exit.min_margin)
    return Exit(
        early_exit=early_exit,
        num_layers=num_layers,
        tokens=leaves.size,
        exits=float(np.mean(leaves)),
        disagreement=float(np.mean(leaves & ~rows.agrees)),
        nll=float(np.mean(np.where(leaves, rows.nll, rows.nll_full), dtype=np.float64)),
        nll_full=float(np.mean(rows.nll_full, dtype=np.float64)),
        kl=float(np.mean(np.where(leaves, rows.kl, 0.0), dtype=np.float64)),
    )
