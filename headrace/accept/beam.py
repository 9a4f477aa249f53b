"""Beam search: of all continuations of a request's sequences, the likeliest few live on.

A beam's total is the sum of its tokens' log-probabilities, under biases and penalties, at temperature 1. Its score, by which
finished ones are compared, is total / length ** length_penalty (Wu et al. 2016, without their constant 5; length counts output
tokens, an end token included). Finishing and stopping are as in transformers.
"""

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from headrace.accept import Accepted, AnyOutput, Draw, OutputView
from headrace.accept.sampler import Pool, likeliest_all, token_logprobs
from headrace.batch import Commit


class Candidate(NamedTuple):
    """One beam, longer by a token. They are ordered best first: of equal totals by beam, then by token."""

    loss: float  # the total, negated
    beam: int
    token: int


class Hypothesis(NamedTuple):
    """A beam that has ended."""

    score: float
    line: OutputView


@dataclass(slots=True, eq=False)
class BeamSearch:
    """One search. Its draws come in the order of the beams, best first, and so do its commits."""

    width: int
    num_results: int
    length_penalty: float
    early_stopping: bool
    num_end_ids: int
    """Tokens that may end a beam: each beam has so many candidates more than can live on, and still more with stop strings."""
    totals: list[float] = field(default_factory=lambda: [0.0])
    """Of the live beams."""
    finished: list[Hypothesis] = field(default_factory=list)
    """At most `width`, best first; of equal ones the earlier."""
    is_group = True

    def accept(self, draws: list[Draw], logits: NDArray[np.float32], pool: Pool) -> list[Accepted]:
        """The beams of the next length; none when the search has ended."""
        assert len(draws) == len(self.totals), "all beams draw together"
        if draws[0].line.token_ids:  # the samplers have not seen what the last search step chose
            for draw in draws:
                draw.sampler.append(draw.known[-1])
        count = self.width + self.num_end_ids
        while (candidates := self._candidates(draws, logits, pool, count)) is not None:
            if (accepted := self._select(candidates, draws, logits, count)) is not None:
                return accepted
            count *= 2
        return [Accepted(i, None) for i in range(len(draws))]

    def outputs(self, lines: list[AnyOutput]) -> list[AnyOutput]:
        """The best, once all beams have ended; beams that were cut short are compared with those that finished."""
        if any(line.finish_reason is None for line in lines):
            return []
        cut_short = list(map(self._hypothesis, lines, self.totals))
        best = sorted([*self.finished, *cut_short], key=lambda hypothesis: -hypothesis.score)
        return [cast(AnyOutput, hypothesis.line) for hypothesis in best[: self.num_results]]  # finished ones are clones of such lines

    def _candidates(self, draws: list[Draw], logits: NDArray[np.float32], pool: Pool, count: int) -> list[Candidate] | None:
        """The best `count` continuations of each beam, best first; None where logits are not finite."""
        rows = likeliest_all(pool, logits, [(draw.sampler, draw.row, len(draw.known), count) for draw in draws])
        if None in rows:
            return None
        return sorted(
            Candidate(-total - logprob, beam, token)
            for beam, (total, row) in enumerate(zip(self.totals, rows, strict=True))
            for token, logprob in zip(*row, strict=True)
            if logprob > -np.inf  # or it is banned
        )

    def _select(self, candidates: list[Candidate], draws: list[Draw], logits: NDArray[np.float32], count: int) -> list[Accepted] | None:
        """Of the best `width` candidates those that end are finished; the best `width` that do not end live on.

        Those that end further down the order are forgotten: there is always something better that goes on. None, with nothing
        changed, when stop strings end so many that more than `count` candidates of a beam must be seen.
        """
        accepted: list[Accepted] = []
        totals: list[float] = []
        finished = self.finished[:]
        unseen = [count] * len(draws)
        for rank, (loss, beam, token) in enumerate(candidates):
            draw = draws[beam]
            logprobs = [token_logprobs(logits[draw.row], token, draw.num_logprobs)] if draw.num_logprobs >= 0 else []
            line = draw.line.clone()
            line.push(token, logprobs[0] if logprobs else None)
            if line.finish_reason is None:
                accepted.append(Accepted(beam, Commit(draw.source, [], [token], logprobs)))
                totals.append(-loss)
            elif rank < self.width:
                insort(finished, self._hypothesis(line, -loss), key=lambda hypothesis: -hypothesis.score)
            if len(accepted) == self.width or (rank >= self.width - 1 and line.finish_reason == "length"):
                break
            unseen[beam] -= 1
            if not unseen[beam] and count < logits.shape[1]:
                return None
        self.finished = finished[: self.width]
        self.totals = [] if self._ends(totals, len(draws[0].line.token_ids) + 1) else totals
        return accepted if self.totals else []

    def _hypothesis(self, line: AnyOutput, total: float) -> Hypothesis:
        line.cumulative_logprob = total
        return Hypothesis(self._score(total, len(line.token_ids)), line)

    def _score(self, total: float, length: int) -> float:
        return float(total / max(length, 1) ** self.length_penalty)

    def _ends(self, totals: list[float], length: int) -> bool:
        """Whether no beam goes on, or enough are finished.

        `width` of them are, if stopping is early. Else the best live beam must also score no more at its present length than
        the worst of them: a beam that would gain by its length later is given up.
        """
        full = len(self.finished) == self.width
        return not totals or (full and (self.early_stopping or self._score(totals[0], length) <= self.finished[-1].score))
