"""Calibrates an early exit: where tokens may leave, and how clear they must be there.

CALM (Schuster et al. 2022) chooses the least strict threshold whose disagreement with the full
model is bounded with a stated probability, by learn-then-test (Angelopoulos et al. 2021). A
threshold passes two tests: a binomial one, which takes tokens as independent, and one on the pieces
of the text, because tokens of one topic are not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backend_traits import BackendName
from headrace.checkpoint.fingerprint import fingerprint
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.convert.quality import Scorer
from headrace.convert.texts import calibration_pieces
from headrace.errors import RequestError
from headrace.loader.backend_choice import with_backend
from headrace.loader.calibration_file import write_calibration
from headrace.loader.early_exit import KIND
from headrace.loader.exit_map import ExitMap
from headrace.loader.load import open_files
from headrace.loader.options import engine_config
from headrace.measure.progress import ProgressCallback, ignore_progress, track
from headrace.model import trace_model
from headrace.model.spec import EarlyExit, exit_map_name
from headrace.planner.host import usable_cores
from headrace.planner.prices import Price
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.record import frozen
from headrace.validation import integer, number

_EIGHTHS = (2, 4, 5, 6, 7)
"""Exits that are tried, in eighths of all layers."""
_MARGINS = np.linspace(1.0, 0.0, 201)
"""Thresholds in the order of their tests, which the text must not choose."""
_LENGTH = 256
_MIN_PIECES = 16
"""A quarter chooses: four, the fewest that show how much pieces differ."""
_RIDGE = 0.01
"""Penalty of a map, in mean squares of its inputs."""

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@frozen(eq=False)
class ExitRows:
    """What each token of a text would be after the first layers, and after all."""

    margin: Floats  # [tokens]
    """Probability of the best token less that of the next, after the first layers."""
    agrees: Flags  # [tokens]
    """Whether the first layers have the full model's most likely token."""
    nll: Floats  # [tokens]
    """Loss of the text's next token after the first layers, in nats."""
    nll_full: Floats  # [tokens]
    kl: Floats  # [tokens]
    """Divergence from the full model, in nats."""
    piece: NDArray[np.int64]  # [tokens]
    """Number of the token's piece of the text."""

    def take(self, chosen: Flags) -> "ExitRows":
        return ExitRows(
            margin=self.margin[chosen],
            agrees=self.agrees[chosen],
            nll=self.nll[chosen],
            nll_full=self.nll_full[chosen],
            kl=self.kl[chosen],
            piece=self.piece[chosen],
        )


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
    tokens: int = 16_384,
    backend: BackendName = EngineConfig.backend,
    threads: int = EngineConfig.threads,
    on_progress: ProgressCallback = ignore_progress,
) -> ExitCalibration:
    """Choose the exit that saves the most layers within a bound.

    Half of the text's pieces fit a linear map for each exit, a quarter choose the exit, and a
    quarter measure it.

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
    if checkpoint.spec.num_layers == 1:
        raise RequestError("the model has one layer, so no token can leave before the others")
    file = Path(text) if text else None
    pieces = calibration_pieces(checkpoint, file, _LENGTH, tokens)
    if len(pieces) < _MIN_PIECES:
        raise RequestError(
            f"the text has {len(pieces)} pieces of up to {_LENGTH} tokens, and a calibration needs "
            f"{_MIN_PIECES}: some fit, some choose and some measure; use a longer text"
        )
    order = np.random.default_rng(0).permutation(len(pieces))
    fitting, others = split_pieces(pieces, order)
    reader = ExitReader(config, checkpoint, _LENGTH)
    try:
        maps = reader.fit(fitting, on_progress)
        rows = reader.read(others, maps, on_progress)
    finally:
        reader.close()
    chooses = rows[reader.depths[0]].piece % 2 == 0
    chosen = choose_exit(
        {depth: each.take(chooses) for depth, each in rows.items()},
        checkpoint.spec.num_layers,
        max_disagreement,
        error_probability,
    )
    measured = None
    if chosen:
        measured = exit_on(
            rows[chosen.num_layers].take(~chooses), chosen, checkpoint.spec.num_layers
        )
    return ExitCalibration(
        chosen=measured,
        max_disagreement=max_disagreement,
        error_probability=error_probability,
        exit_map=maps[chosen.num_layers] if chosen else None,
        fitting_tokens=sum(map(len, fitting)),
        calibration_tokens=int(chooses.sum()),
        text=file.name if file else "Python's language reference",
        model=fingerprint(checkpoint, checkpoint.load_tokenizer()),
    )


def split_pieces(
    pieces: Sequence[list[int]], order: Sequence[int] | NDArray[np.int64]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the pieces that fit maps, and the others."""
    half = len(pieces) // 2
    return [pieces[i] for i in order[:half]], [pieces[i] for i in order[half:]]


def choose_exit(
    rows: Mapping[int, ExitRows],
    num_layers: int,
    max_disagreement: float,
    error_probability: float,
) -> EarlyExit | None:
    """Return the exit that leaves out the most layers for tokens that agree, of those that pass
    the test; or None.

    Tokens that disagree save layers, too, but a low exit would spend the whole bound on them.
    `rows` by depth. For each depth, thresholds are tested from the strictest one down, until the
    first that fails the tests of "more than `max_disagreement`". The depths share the error
    probability, so that the bound holds for whichever is chosen.
    """
    best, saved = None, 0.0
    for depth, each in rows.items():
        margin = _least_margin(each, max_disagreement, error_probability / len(rows))
        if margin is None:
            continue
        agreeing = (each.margin >= np.float32(margin)) & each.agrees
        saving = float(np.mean(agreeing)) * (1 - depth / num_layers)
        if saving > saved:
            best, saved = EarlyExit(depth, margin), saving
    return best


def _least_margin(rows: ExitRows, max_share: float, error_probability: float) -> float | None:
    most = most_events(len(rows.margin), max_share, error_probability)
    _, piece = np.unique(rows.piece, return_inverse=True)
    sizes = np.bincount(piece)
    passed = None
    for margin in _MARGINS.tolist():
        wrong = (rows.margin >= np.float32(margin)) & ~rows.agrees
        events = np.bincount(piece, weights=wrong.astype(np.float64)).astype(np.float64)
        if events.sum() > most or largest_share(events, sizes, error_probability) > max_share:
            return passed
        passed = margin
    return passed


def largest_share(
    events: NDArray[np.float64], sizes: NDArray[np.int64], error_probability: float
) -> float:
    """The share of events that is exceeded with the error probability, by samples of clusters.

    It is the upper end of a t interval around a ratio (Cochran 1977, section 9A): clusters [n] of
    `sizes` have `events`. One cluster shows nothing, so the result is infinite.
    """
    n = len(sizes)
    if n < 2:
        return math.inf
    total = int(sizes.sum())
    share = float(events.sum()) / total
    spread = float(np.sum((events - share * sizes) ** 2)) * n / (n - 1)
    return share + _t_quantile(1 - error_probability, n - 1) * math.sqrt(spread) / total


def _t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's distribution, by Fisher's expansion (1941); 2 % low for 3 degrees."""
    z: float = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


def most_events(trials: int, share: float, error_probability: float) -> int:
    """The largest number of events in `trials` that shows that their share is below `share`.

    With a share of at least `share`, as few events have at most `error_probability`. Returns -1 if
    no number shows it.
    """
    if share <= 0:
        return -1
    total = 0.0
    for count in range(trials + 1):
        chance = (
            math.lgamma(trials + 1)
            - math.lgamma(count + 1)
            - math.lgamma(trials - count + 1)
            + count * math.log(share)
            + (trials - count) * (math.log1p(-share) if share < 1 else -math.inf)
        )
        total += math.exp(chance) if count < trials or share < 1 else 1.0
        if total > error_probability:
            return count - 1
    return trials


def exit_on(rows: ExitRows, early_exit: EarlyExit, num_layers: int) -> Exit:
    """Measure an exit on tokens."""
    leaves = rows.margin >= np.float32(early_exit.min_margin)
    return Exit(
        early_exit=early_exit,
        num_layers=num_layers,
        tokens=len(leaves),
        exits=float(np.mean(leaves)),
        disagreement=float(np.mean(leaves & ~rows.agrees)),
        nll=float(np.mean(np.where(leaves, rows.nll, rows.nll_full), dtype=np.float64)),
        nll_full=float(np.mean(rows.nll_full, dtype=np.float64)),
        kl=float(np.mean(np.where(leaves, rows.kl, 0.0), dtype=np.float64)),
    )


class ExitReader:
    """A model, and its first layers at each candidate exit, over one KV."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, length: int) -> None:
        """`length`: maximum tokens of a piece."""
        self._spec, self._tensors = checkpoint.spec, checkpoint.tensors
        num_layers = self._spec.num_layers
        self.depths = sorted({max(1, num_layers * part // 8) for part in _EIGHTHS} - {num_layers})
        self._full = Scorer(
            trace_model(self._spec, self._tensors).with_hidden(),
            self._tensors,
            length,
            config.backend,
            config.threads or usable_cores(),
            config.kv_format,
            config.activations,
        )

    def close(self) -> None:
        self._full.close()

    def fit(
        self, pieces: Sequence[Sequence[int]], on_progress: ProgressCallback
    ) -> dict[int, ExitMap]:
        """Fit the map of each exit to the last rows of a text, by ridge regression."""
        short = {
            depth: self._full.attach(
                trace_model(self._spec.with_layers(range(depth)), self._tensors).with_hidden(),
                self._tensors,
            )
            for depth in self.depths
        }
        dim = self._spec.dim
        squares = {depth: np.zeros((dim + 1, dim + 1)) for depth in self.depths}
        products = {depth: np.zeros((dim + 1, dim)) for depth in self.depths}
        for piece in track(pieces, len(pieces), "fitting maps", on_progress):
            last = self._full.hidden_rows(piece)
            for depth, scorer in short.items():
                rows = np.pad(scorer.hidden_rows(piece), ((0, 0), (0, 1)), constant_values=1)
                squares[depth] += rows.T @ rows
                products[depth] += rows.T @ last
        return {depth: _ridge(squares[depth], products[depth]) for depth in self.depths}

    def read(
        self,
        pieces: Sequence[Sequence[int]],
        maps: Mapping[int, ExitMap],
        on_progress: ProgressCallback,
    ) -> dict[int, ExitRows]:
        """Read a text. Returns the rows by depth."""
        short = [self._full.attach(*self._mapped(depth, maps[depth])) for depth in self.depths]
        parts: dict[int, list[ExitRows]] = {depth: [] for depth in self.depths}
        for index, piece in enumerate(track(pieces, len(pieces), "reading a text", on_progress)):
            position = 0
            readers = [each.log_probabilities(piece) for each in (self._full, *short)]
            for full, *early in zip(*readers, strict=True):
                after = np.array(piece[position + 1 : position + 1 + len(full)])
                position += len(full)
                for depth, log_p in zip(self.depths, early, strict=True):
                    rows = _rows(full[: len(after)], log_p[: len(after)], after, index)
                    parts[depth].append(rows)
        return {depth: _joined(each) for depth, each in parts.items()}

    def _mapped(self, depth: int, exit_map: ExitMap) -> tuple[Program, Mapping[str, StoredTensor]]:
        """The first layers with the map; every row leaves."""
        tensors = {**self._tensors, **exit_map.tensors(exit_map_name(depth))}
        spec = replace(self._spec, early_exit=EarlyExit(depth, 0.0))
        return trace_model(spec.with_layers(range(depth)), tensors), tensors


def _ridge(squares: NDArray[np.float64], products: NDArray[np.float64]) -> ExitMap:
    penalty = _RIDGE * np.trace(squares) / len(squares)
    solved = np.linalg.solve(squares + penalty * np.eye(len(squares)), products)  # [dim + 1, dim]
    return ExitMap.of(solved[:-1].T.astype(np.float32), solved[-1].astype(np.float32))


def _rows(full: Floats, early: Floats, after: NDArray[np.int64], piece: int) -> ExitRows:
    best = np.exp(np.partition(early, -2, axis=1)[:, -2:])
    picked = np.arange(len(after)), after
    return ExitRows(
        margin=np.abs(best[:, 1] - best[:, 0]),
        agrees=early.argmax(axis=1) == full.argmax(axis=1),
        nll=-early[picked],
        nll_full=-full[picked],
        kl=np.sum(np.exp(full) * (full - early), axis=1),
        piece=np.full(len(after), piece),
    )


def _joined(parts: Sequence[ExitRows]) -> ExitRows:
    names = ("margin", "agrees", "nll", "nll_full", "kl", "piece")
    return replace(
        parts[0],
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names},
    )
