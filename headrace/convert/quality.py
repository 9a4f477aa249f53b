"""What a model says of a text, and how far that is from what another says: the measures of
quantisation.

Texts are cut into pieces, each from an empty cache. NLL is the mean negative log-likelihood of a
token given those before it in its piece, in nats, and perplexity its exponential. KL is the
divergence KL(reference, model) of the distributions of the next token: the mean and the 99th
percentile over all places. Agreement is how often both hold the same token for the likeliest.
"""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable, compile_program, forward
from headrace.backend_traits import KvDtype
from headrace.batch import RaggedBatch
from headrace.config import Activations, KvConfig
from headrace.convert.batches import num_blocks, piece_batch
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

_ROWS = 64
"""Rows whose logits are there at a time."""
_PREFILLS, _STEPS = 3, 30
"""Steps whose median is a speed."""

Floats = NDArray[np.float32]


@frozen
class Quality:
    """How well a model predicts a text."""

    tokens: int
    """Places that count."""
    nll: float
    nll_error: float
    """Standard error of the mean."""
    kl: float | None = None
    """Mean divergence from the reference, in nats; None without one."""
    kl_99: float | None = None
    agreement: float | None = None
    """Part of the places where the likeliest token is the reference's."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


class Scorer:
    """A compiled model that reads pieces of text, of at most `length` tokens."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, StoredTensor],
        length: int,
        backend: str,
        threads: int,
        kv_dtype: KvDtype = "bf16",
        activations: Activations = "int8",
    ) -> None:
        program = trace_model(spec, tensors)
        self._groups = len(program.kv_groups)
        self._blocks = num_blocks(length)
        kv = KvConfig((self._blocks,) * self._groups, dtype=kv_dtype)
        self.executable: Executable = compile_program(
            backend, program, tensors, kv, threads, activations
        )

    def log_probabilities(self, piece: Sequence[int]) -> Iterator[Floats]:
        """The log-probabilities of the token after each, some rows at a time [rows, vocabulary]."""
        for first in range(0, len(piece), _ROWS):
            logits = forward(
                self.executable, self._batch(piece, first, min(first + _ROWS, len(piece)))
            ).logits
            assert logits is not None
            shifted = logits - logits.max(axis=1, keepdims=True)
            yield shifted - np.log(
                np.exp(shifted, dtype=np.float64).sum(axis=1, keepdims=True)
            ).astype(np.float32)

    def speed(self, piece: Sequence[int]) -> tuple[float, float]:
        """Tokens/s of a piece at once, and of single steps at its end: medians of a few."""
        prefill, decode = (
            self._batch(piece, 0, len(piece), 1),
            self._batch(piece, len(piece) - 1, len(piece)),
        )
        seconds = []
        for batch, times in ((prefill, _PREFILLS), (decode, _STEPS)):
            taken = []
            for _ in range(times):
                begun = time.perf_counter()
                self.executable.launch(batch).wait()
                taken.append(time.perf_counter() - begun)
            seconds.append(statistics.median(taken))
        return len(piece) / seconds[0], 1 / seconds[1]

    def close(self) -> None:
        self.executable.close()

    def _batch(
        self, piece: Sequence[int], first: int, end: int, num_logits: int = _ROWS
    ) -> RaggedBatch:
        return piece_batch(piece, first, end, num_logits, self._blocks, self._groups)


def pieces_of(ids: Sequence[int], length: int, tokens: int) -> list[list[int]]:
    """The tokens of a text in pieces of `length`, as many as make `tokens`, or one that is
    shorter.
    """
    count = max(1, min(tokens, len(ids)) // length)
    return [list(ids[i * length : (i + 1) * length]) for i in range(count)]


class Judge:
    """Adds up what a model says of pieces of text, beside what the reference says of them."""

    def __init__(self) -> None:
        self._losses: list[Floats] = []
        self._divergences: list[Floats] = []
        self._agreed = 0

    def add(
        self, piece: Sequence[int], said: Iterator[Floats], by_reference: Iterator[Floats] | None
    ) -> None:
        """A piece, with log-probabilities as `Scorer` gives them. The last token has none after it
        that could be right.
        """
        at = 0
        for q in said:
            rows = min(len(q), len(piece) - 1 - at)
            wanted = np.asarray(piece[at + 1 : at + 1 + rows])
            self._losses.append(-q[np.arange(rows), wanted])
            if by_reference is not None:
                p = next(by_reference)[:rows]
                self._divergences.append(
                    (np.exp(p) * (p - q[:rows])).sum(axis=1, dtype=np.float64).astype(np.float32)
                )
                self._agreed += int((p.argmax(axis=1) == q[:rows].argmax(axis=1)).sum())
            at += len(q)

    def quality(self) -> Quality:
        """All that was added."""
        losses = np.concatenate(self._losses)
        nll, error = float(losses.mean()), float(losses.std() / math.sqrt(len(losses)))
        if not self._divergences:
            return Quality(len(losses), nll, error)
        kl = np.concatenate(self._divergences)
        return Quality(
            len(losses),
            nll,
            error,
            float(kl.mean()),
            float(np.quantile(kl, 0.99)),
            self._agreed / len(losses),
        )
