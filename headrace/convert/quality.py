"""Measures of quantisation.

* NLL: the mean negative log-likelihood of a token, in nats.

* KL: the divergence KL(reference, model) of next-token distributions.

* Agreement: the share of positions with the same likeliest token.
"""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy

import numpy as np

from headrace.backend import Executable, compile_program, forward
from headrace.backend_traits import KvDtype
from headrace.batch import RaggedBatch
from headrace.config import Activations, KeyRounding, KvConfig
from headrace.convert.sequence_batch import num_blocks, sequence_batch
from headrace.program.trace import Program
from headrace.quant.arrays import Floats
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

_ROWS = 64
_PREFILL_RUNS, _DECODE_RUNS = 3, 30


@frozen
class Quality:
    tokens: int
    nll: float
    nll_error: float
    """Standard error."""
    kl: float | None = None
    """In nats; None without a reference."""
    kl_99: float | None = None
    agreement: float | None = None
    """From 0 to 1."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


class Scorer:
    """A compiled model that reads pieces of up to `length` tokens."""

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, StoredTensor],
        length: int,
        backend: str,
        threads: int,
        kv_dtype: KvDtype = "bf16",
        activations: Activations = "int8",
        key_rounding: tuple[KeyRounding, ...] = (),
    ) -> None:
        self.kv_dtype = kv_dtype
        self._groups = len(program.kv_groups)
        self._blocks = num_blocks(length)
        kv = KvConfig((self._blocks,) * self._groups, dtype=kv_dtype, key_rounding=key_rounding)
        self.executable: Executable = compile_program(
            backend, program, tensors, kv, threads, activations
        )

    def log_probabilities(self, piece: Sequence[int]) -> Iterator[Floats]:
        """Yield chunks [rows, vocabulary]."""
        for first in range(0, len(piece), _ROWS):
            batch = self.batch(piece, first, min(first + _ROWS, len(piece)))
            logits = forward(self.executable, batch).logits
            assert logits is not None
            shifted = logits - logits.max(axis=1, keepdims=True)
            sums = np.exp(shifted, dtype=np.float64).sum(axis=1, keepdims=True)
            yield shifted - np.log(sums).astype(np.float32)

    def hidden_rows(self, piece: Sequence[int]) -> Floats:
        """Return the rows before the head [rows, dim] of a program that keeps them."""
        chunks = []
        for first in range(0, len(piece), _ROWS):
            batch = self.batch(piece, first, min(first + _ROWS, len(piece)))
            hidden = self.executable.launch(batch, hidden=True).wait().hidden
            assert hidden is not None, "the program keeps its hidden rows"
            chunks.append(hidden.copy())
        return np.concatenate(chunks)

    def speed(self, piece: Sequence[int]) -> tuple[float, float]:
        """Measure tokens/s of prefill and of decoding after the piece."""
        prefill = self.batch(piece, 0, len(piece), 1)
        decode = self.batch(piece, len(piece) - 1, len(piece))
        prefill_seconds = statistics.median(self.seconds(prefill) for _ in range(_PREFILL_RUNS))
        decode_seconds = statistics.median(self.seconds(decode) for _ in range(_DECODE_RUNS))
        return len(piece) / prefill_seconds, 1 / decode_seconds

    def attach(self, program: Program, tensors: Mapping[str, StoredTensor]) -> "Scorer":
        """Compile another program over the same KV; closing this model ends both."""
        attached = copy(self)
        attached.executable = self.executable.attach(program, tensors)
        return attached

    def read(self, piece: Sequence[int]) -> None:
        """Write the KV of a piece."""
        for first in range(0, len(piece), _ROWS):
            self.seconds(self.batch(piece, first, min(first + _ROWS, len(piece)), 1))

    def close(self) -> None:
        self.executable.close()

    def seconds(self, batch: RaggedBatch) -> float:
        """Time a step."""
        start = time.perf_counter()
        self.executable.launch(batch).wait()
        return time.perf_counter() - start

    def batch(
        self, piece: Sequence[int], first: int, end: int, num_logits: int = _ROWS
    ) -> RaggedBatch:
        return sequence_batch(piece, first, end, num_logits, self._blocks, self._groups)


class QualityMeter:
    def __init__(self, prefix: int = 0) -> None:
        """`prefix`: tokens of each piece that are given, and not of the text."""
        self._first = max(0, prefix - 1)
        self._losses: list[Floats] = []
        self._divergences: list[Floats] = []
        self._num_agreed = 0

    def add(
        self, piece: Sequence[int], predicted: Iterator[Floats], reference: Iterator[Floats] | None
    ) -> None:
        position = 0
        for q in predicted:
            scored = slice(max(0, self._first - position), len(piece) - 1 - position)
            p = None if reference is None else next(reference)[scored]
            correct = np.asarray(piece[position + 1 :], np.int64)[: len(q)]
            position += len(q)
            q, correct = q[scored], correct[scored]
            self._losses.append(-q[np.arange(len(q)), correct])
            if p is not None:
                divergences = (np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64)
                self._divergences.append(divergences.astype(np.float32))
                self._num_agreed += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())

    def quality(self) -> Quality:
        losses = np.concatenate(self._losses)
        nll, error = float(losses.mean()), float(losses.std() / math.sqrt(len(losses)))
        if not self._divergences:
            return Quality(tokens=len(losses), nll=nll, nll_error=error)
        kl = np.concatenate(self._divergences)
        return Quality(
            tokens=len(losses),
            nll=nll,
            nll_error=error,
            kl=float(kl.mean()),
            kl_99=float(np.quantile(kl, 0.99)),
            agreement=self._num_agreed / len(losses),
        )
