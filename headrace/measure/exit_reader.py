"""Reads a text with a model's first layers and with all, to calibrate an early exit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.backend import forward
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.convert.quality import Scorer
from headrace.loader.exit_map import ExitMap
from headrace.measure.progress import ProgressCallback, track
from headrace.model import trace_model
from headrace.model.spec import EarlyExit, exit_map_name
from headrace.planner.host import usable_cores
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

PIECE = 257
"""Tokens of a piece: the rows of eight windows, and a next token."""
WINDOW = 32
"""Tokens of a window. The first window of a piece is only context of the others: few of its tokens
differ, and decoding has more context."""
_EIGHTHS = (2, 4, 5, 6, 7)
"""Exits that are tried, in eighths of all layers."""
_RIDGE = 0.01
"""Penalty of a map, in mean squares of its inputs."""

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@frozen(eq=False)
class ExitRows:
    """What each token of a text would be after the first layers, and after all.

    Arrays are [windows, tokens].
    """

    margin: Floats
    """Probability of the best token less that of the next, after the first layers."""
    agrees: Flags
    """Whether the first layers have the full model's most likely token."""
    nll: Floats
    """Loss of the text's next token after the first layers, in nats."""
    nll_full: Floats
    kl: Floats
    """Divergence from the full model, in nats."""

    def take(self, windows: Flags) -> "ExitRows":
        return ExitRows(
            margin=self.margin[windows],
            agrees=self.agrees[windows],
            nll=self.nll[windows],
            nll_full=self.nll_full[windows],
            kl=self.kl[windows],
        )

    def disagreement(self, min_margin: float) -> NDArray[np.float64]:
        """Return the share of tokens [windows] that leave and differ from the full model's."""
        differ = (self.margin >= np.float32(min_margin)) & ~self.agrees
        shares: NDArray[np.float64] = differ.mean(axis=1)
        return shares


def windows_in(piece: Sequence[int]) -> int:
    """The number of windows after the first; the last token of a piece has no row."""
    return max(0, (len(piece) - 1) // WINDOW - 1)


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
        step: str,
    ) -> dict[int, ExitRows]:
        """Read the windows of a text. Returns rows by depth, for each depth with a map."""
        short = {depth: self._full.attach(*self._mapped(depth, maps[depth])) for depth in maps}
        parts: dict[int, list[ExitRows]] = {depth: [] for depth in maps}
        for piece in track(pieces, len(pieces), step, on_progress):
            self._full.read(piece[:WINDOW])
            for window in range(1, windows_in(piece) + 1):
                first, end = window * WINDOW, (window + 1) * WINDOW
                after = np.array(piece[first + 1 : end + 1])
                full = log_probabilities(self._full, piece, first, end)
                for depth, scorer in short.items():
                    early = log_probabilities(scorer, piece, first, end)
                    parts[depth].append(_rows(full, early, after))
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


def log_probabilities(scorer: Scorer, piece: Sequence[int], first: int, end: int) -> Floats:
    """Compute some rows of a piece, after all before them. Returns [rows, vocabulary]."""
    logits = forward(scorer.executable, scorer.batch(piece, first, end)).logits
    assert logits is not None, "the batch has logit rows"
    shifted: Floats = logits - logits.max(axis=1, keepdims=True)
    sums = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    shifted -= np.log(sums).astype(np.float32)
    return shifted


def _rows(full: Floats, early: Floats, after: NDArray[np.int64]) -> ExitRows:
    """The window of two models' log-probabilities [tokens, vocabulary]."""
    each = np.arange(len(after))
    kl = np.sum(np.exp(full) * (full - early), axis=1)
    nll = -early[each, after]
    best = early.argmax(axis=1)
    most = early[each, best]
    early[each, best] = -np.inf
    second = early.max(axis=1)
    return ExitRows(
        margin=(np.exp(most) - np.exp(second))[None],
        agrees=(best == full.argmax(axis=1))[None],
        nll=nll[None],
        nll_full=-full[each, after][None],
        kl=kl[None],
    )


def _joined(parts: Sequence[ExitRows]) -> ExitRows:
    names = ("margin", "agrees", "nll", "nll_full", "kl")
    return replace(
        parts[0],
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names},
    )
