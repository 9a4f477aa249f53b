"""Measures drafts against the text that a compiled model writes after a prompt."""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable, forward
from headrace.batch import Ints, RaggedBatch
from headrace.kv.blocks import Table
from headrace.kv.rows import TokenRun, batch_of_runs
from headrace.measure.progress import ProgressCallback
from headrace.planner.draft_gain import Costs

_CHUNK = 64
"""Rows of a step, whose logits are all kept."""
_CHAIN = 8
"""Rows of a draft that continues from the model's KV, as in a deep chain of drafts."""
_ROUNDS = 15
_DRAFT_STEPS = 3
"""Draft steps timed in a row, so that caches are as in a real draft."""


class CalibrationText(NamedTuple):
    """The text that the model writes, and the depth up to which drafts are measured on it."""

    prompt: list[int]
    num_tokens: int
    max_depth: int

    @property
    def length(self) -> int:
        return len(self.prompt) + self.num_tokens + self.max_depth + 1


class Measured(NamedTuple):
    acceptance: float
    costs: Costs


class TextMeter:
    """Measures draft models against the text that a compiled model writes after a prompt."""

    def __init__(self, target: Executable, text: CalibrationText, block_size: int) -> None:
        self._target = target
        self._num_prompt = len(text.prompt)
        self._max_depth = text.max_depth
        self._block_size = block_size
        self._blocks = range(-(-text.length // block_size))
        self._text = list(text.prompt)
        self._write(text.num_tokens)

    def measure(
        self, drafts: Sequence[Executable], on_progress: ProgressCallback, first: int = 0
    ) -> list[Measured]:
        """Measure acceptance and costs of each draft model.

        `first` is the first token of the text after the prompt that counts. The timed steps take
        turns, so that a busy machine slows all of them.
        """
        acceptances = []
        for number, draft in enumerate(drafts):
            on_progress(f"acceptance of draft model {number + 1}", number / len(drafts))
            acceptances.append(self.acceptance(draft, first, self.num_tokens))

        depths = range(self._max_depth + 1)
        target_seconds: list[list[float]] = [[] for _ in depths]
        draft_seconds: list[list[float]] = [[] for _ in drafts]
        for number in range(_ROUNDS):
            on_progress(f"step times, round {number + 1} of {_ROUNDS}", number / _ROUNDS)
            for depth in depths:
                target_seconds[depth].append(self._step_seconds(self._target, 1 + depth))
            for draft, seconds in zip(drafts, draft_seconds, strict=True):
                steps = [self._step_seconds(draft, 1) for _ in range(_DRAFT_STEPS)]
                seconds.append(statistics.fmean(steps))

        target_medians = [statistics.median(seconds) for seconds in target_seconds]
        return [
            Measured(acceptance, Costs(target=target_medians, draft=statistics.median(seconds)))
            for acceptance, seconds in zip(acceptances, draft_seconds, strict=True)
        ]

    def _write(self, num_tokens: int) -> None:
        self._argmax(self._target, self._text[:-1], 0)
        for _ in range(num_tokens):
            last = len(self._text) - 1
            self._text.append(int(self._argmax(self._target, self._text[last:], last)[-1]))

    @property
    def num_tokens(self) -> int:
        """Tokens of the text after the prompt."""
        return len(self._text) - self._num_prompt

    def acceptance(self, draft: Executable, first: int, end: int) -> float:
        """The share of tokens `first` to `end` of the text after the prompt that a draft predicts.

        A self-draft continues from the model's KV, as when it drafts: the model computes each
        chain again before the next.
        """
        begin, stop = self._num_prompt + first - 1, self._num_prompt + end - 1
        if draft.kv_groups is not self._target.kv_groups:
            predicted = self._argmax(draft, self._text[:stop], 0)[begin:]
        else:
            parts = []
            for start in range(begin, stop, _CHAIN):
                chain = self._text[start : min(stop, start + _CHAIN)]
                parts.append(self._chunk_argmax(draft, chain, start))
                self._chunk_argmax(self._target, chain, start)
            predicted = np.concatenate(parts)
        return float(np.mean(predicted == self._text[begin + 1 : stop + 1]))

    def _argmax(
        self, executable: Executable, tokens: list[int], computed: int
    ) -> NDArray[np.int64]:  # [tokens]
        parts = [
            self._chunk_argmax(executable, tokens[start : start + _CHUNK], computed + start)
            for start in range(0, len(tokens), _CHUNK)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _chunk_argmax(
        self, executable: Executable, tokens: list[int], computed: int
    ) -> NDArray[np.int64]:
        logits = forward(executable, self._batch(executable, tokens, computed)).logits
        assert logits is not None, "the batch has logit rows"
        tokens_after: NDArray[np.int64] = logits.argmax(axis=1)
        return tokens_after

    def _batch(self, executable: Executable, tokens: list[int], computed: int) -> RaggedBatch:
        tables = tuple(Table(self._blocks) for _ in executable.kv_groups)
        batch = batch_of_runs([TokenRun(tokens, computed, tables)], self._block_size, logits=True)
        rows: Ints = np.arange(len(tokens), dtype=np.int32)
        return batch._replace(logit_rows=rows, seq_of=np.zeros_like(rows))

    def _step_seconds(self, executable: Executable, rows: int) -> float:
        batch = self._batch(executable, self._text[-rows:], len(self._text))
        started = time.perf_counter()
        executable.launch(batch).wait()
        return time.perf_counter() - started
