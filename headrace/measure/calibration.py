"""How often a draft model is right about a model's own text, and what it costs: without the engine,
by the two programs alone.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable, forward
from headrace.batch import Ints, RaggedBatch
from headrace.kv.blocks import Table
from headrace.kv.rows import TokenRun, batch_of_runs
from headrace.planner.draft_gain import Costs, Gain, best_gain

_CHUNK = 64
"""Rows of a step that scores text: their logits are all kept."""
_ROUNDS = 15
_IN_A_ROW = 3
"""Draft tokens that are timed together, as they are drafted: each step finds in the caches what the
one before it left.
"""


class Candidate(NamedTuple):
    """A draft that was measured."""

    name: str
    acceptance: float
    """Share of the model's greedy tokens that the draft's likeliest token gives, after the same
    text.
    """
    costs: Costs

    @property
    def best(self) -> Gain:
        return best_gain(self.acceptance, self.costs)


class Calibration:
    """A model, `target`, and the text that it writes after a prompt, [tokens]; drafts have up to
    `most_depth` tokens.
    """

    def __init__(
        self,
        target: Executable,
        prompt: Sequence[int],
        num_tokens: int,
        block_size: int,
        most_depth: int,
    ) -> None:
        self.target = target
        self.num_prompt = len(prompt)
        self.most_depth = most_depth
        self._block_size = block_size
        self._blocks = range(-(-(len(prompt) + num_tokens + most_depth + 1) // block_size))
        self.text = list(prompt)
        self._write(num_tokens)

    @property
    def blocks(self) -> int:
        """KV blocks that this needs in each group, of the target and of a draft with KV of
        its own.
        """
        return len(self._blocks)

    def measure(
        self, drafts: Mapping[str, Executable], tell: Callable[[str], None]
    ) -> list[Candidate]:
        """Acceptance and costs of each draft. The timed steps of all take turns, and medians
        count.
        """
        shares = {}
        for name, draft in drafts.items():
            tell(f"{name}: how often it is right")
            shares[name] = float(
                np.mean(self._likeliest(draft)[:-1] == self.text[self.num_prompt :])
            )
        depths = range(self.most_depth + 1)
        target: list[list[float]] = [[] for _ in depths]
        costs: dict[str, list[float]] = {name: [] for name in drafts}
        for turn in range(_ROUNDS):
            tell(f"what steps cost, turn {turn + 1} of {_ROUNDS}")
            for depth in depths:
                target[depth].append(self._seconds(self.target, 1 + depth))
            for name, draft in drafts.items():
                costs[name].append(
                    statistics.fmean(self._seconds(draft, 1) for _ in range(_IN_A_ROW))
                )
        medians = [statistics.median(times) for times in target]
        return [
            Candidate(name, shares[name], Costs(medians, statistics.median(costs[name])))
            for name in drafts
        ]

    def _write(self, num_tokens: int) -> None:
        self._score(self.target, self.text[:-1], 0)
        for _ in range(num_tokens):
            last = len(self.text) - 1
            self.text.append(int(self._score(self.target, self.text[last:], last)[-1]))

    def _likeliest(self, draft: Executable) -> NDArray[np.int64]:
        """What the draft takes to be next after each token from the end of the prompt on."""
        parts = [
            self._score(draft, self.text[at : at + _CHUNK], at)
            for at in range(0, len(self.text), _CHUNK)
        ]
        return np.concatenate(parts)[self.num_prompt - 1 :]

    def _score(
        self, executable: Executable, tokens: list[int], computed: int
    ) -> NDArray[np.int64]:  # [tokens]
        parts = []
        for at in range(0, len(tokens), _CHUNK):
            parts.append(
                _logits(
                    executable, self._batch(executable, tokens[at : at + _CHUNK], computed + at)
                ).argmax(axis=1)
            )
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _batch(self, executable: Executable, tokens: list[int], computed: int) -> RaggedBatch:
        """One sequence with logits for all rows."""
        tables = tuple(Table(self._blocks) for _ in executable.kv_groups)
        batch = batch_of_runs([TokenRun(tokens, computed, tables)], self._block_size, logits=True)
        rows: Ints = np.arange(len(tokens), dtype=np.int32)
        return batch._replace(logit_rows=rows, seq_of=np.zeros_like(rows))

    def _seconds(self, executable: Executable, rows: int) -> float:
        """Of one step of so many rows behind the text."""
        batch = self._batch(executable, self.text[-rows:], len(self.text))
        started = time.perf_counter()
        executable.launch(batch).wait()
        return time.perf_counter() - started


def _logits(executable: Executable, batch: RaggedBatch) -> NDArray[np.float32]:
    logits = forward(executable, batch).logits
    assert logits is not None, "they were asked for"
    return logits
