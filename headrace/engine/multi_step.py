"""Plain decoding, several steps in a row with next to nothing between them.

Most steps of most engines are alike: every sequence gives one row and draws one token, nobody joins or forks, and nothing is drafted.
What the engine does between two of them, with memory caches that the weights have just been through, takes as long as a tenth of a
small model's step. So it is done for several at once: a token that was drawn goes straight into the next step, and all are committed
together at the end. Each step is the one that would have come anyway, so nothing changes but when the tokens are told.
"""

from math import ceil
from time import perf_counter
from typing import NamedTuple

import numpy as np

from headrace.accept.sampler import Drawn, draw_all
from headrace.backend import Executable
from headrace.batch import Commit, Ints, KvRows, RaggedBatch, StepRows, TokenLogprobs
from headrace.config import EngineConfig
from headrace.engine.scheduler import ScheduledSequence, Scheduler
from headrace.kv.rows import ints

_MOST = 16
"""Steps in a row: nobody can join, or be told anything, until they have ended."""


class Result(NamedTuple):
    """What came of some steps."""

    rows: StepRows
    """Of the last."""
    commits: list[Commit | None]
    """For each part all its tokens; None: not even the first could be drawn, its logits were not finite."""
    num_steps: int


class MultiStep:
    """Runs such steps, for `multi_step_ms` or a little longer."""

    def __init__(self, scheduler: Scheduler, executable: Executable, block_size: int, config: EngineConfig) -> None:
        self._scheduler = scheduler
        self._executable = executable
        self._block_size = block_size
        self._plain_rule = config.acceptance_method == "exact"
        self._seconds = config.multi_step_ms / 1000
        self._step_seconds = 0.0
        """Of the last ones; 0: there were none."""

    def plan(self, scheduled: list[ScheduledSequence]) -> int:
        """How many steps there may be, with slots reserved for them; 0: these parts need more than plain decoding."""
        if not self._plain_rule or not all(item.is_plain for item in scheduled):
            return 0
        most = min(_MOST, max(1, ceil(self._seconds / self._step_seconds))) if self._step_seconds else _MOST
        for item in scheduled:
            seq = item.seq  # a first token is told at once
            most = min(most, seq.request.limit - len(seq.known) if seq.output.token_ids else 1)
        return self._scheduler.reserve_steps(scheduled, most)

    def run(self, scheduled: list[ScheduledSequence], batch: RaggedBatch, most: int, rest: float) -> Result:
        """Run steps that begin with this batch: `most` of them, or until a sequence ends, the time is over, or somebody wants to draft.

        `rest`: seconds until then.
        """
        begun = perf_counter()
        until = begun + min(self._seconds, rest)
        positions, slots = self._places(batch, most)
        seqs = [item.seq for item in scheduled]
        samplers = [(seq.sampler, len(seq.known), seq.num_logprobs) for seq in seqs]
        ends = [seq.output.end_ids for seq in seqs]
        lines: list[list[Drawn]] = [[] for _ in scheduled]
        over, step = False, -1
        while not over:
            step += 1
            if step:
                tokens = ints([line[-1][0] for line in lines])
                kv = tuple(KvRows(of[step], group.block_table) for of, group in zip(slots, batch.kv, strict=True))
                batch = batch._replace(tokens=tokens, positions=positions[step], context_len=positions[step], kv=kv)
            rows = self._executable.run(batch)
            draws = [(sampler, row, known + step, count) for row, (sampler, known, count) in enumerate(samplers)]
            over = step == most - 1 or perf_counter() >= until
            for line, end_ids, drawn in zip(lines, ends, draw_all(self._executable.pool, rows.logits, draws), strict=True):
                if drawn:
                    line.append(drawn)
                over = over or not drawn or drawn[0] in end_ids
        for item, line in zip(scheduled, lines, strict=True):
            item.num_scheduled = len(line) or 1  # where logits were not finite after some steps, the next one will tell
        self._step_seconds = (perf_counter() - begun) / (step + 1)
        return Result(rows, [_commit(source, line) if line else None for source, line in enumerate(lines)], step + 1)

    def _places(self, batch: RaggedBatch, most: int) -> tuple[Ints, list[Ints]]:  # [steps, sequences] all
        """Positions of the rows of all steps, and their slots in each group of layers."""
        positions = batch.positions + np.arange(most, dtype=np.int32)[:, None]
        blocks, index = np.divmod(positions, self._block_size)
        seqs = np.arange(len(batch.positions))
        return positions, [kv.block_table[seqs, blocks] * self._block_size + index for kv in batch.kv]


def _commit(source: int, line: list[Drawn]) -> Commit:
    logprobs = [TokenLogprobs(*logprobs) for _, logprobs in line if logprobs is not None]
    return Commit(source, [], [token for token, _ in line], logprobs)
