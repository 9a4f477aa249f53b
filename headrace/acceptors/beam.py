"""Beam search: of all continuations of a request's sequences, the likeliest few go on.

The total of a beam is the sum of its tokens' log-probabilities, under biases and penalties, at
temperature 1. Its score, by which finished beams are compared, is total / length ** length_penalty
(Wu et al. 2016, without their constant 5; the length counts output tokens, with an end token).
Beams finish and a search ends as in Hugging Face transformers.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from headrace.acceptors import Accepted, AnyOutput, Drawing, OutputView
from headrace.batch import Commit, TokenLogprobs
from headrace.errors import ConstraintError
from headrace.logit_ops import LogitOp, LogitOpResult, Ranked, TopTokens
from headrace.sampling.host import run_logit_ops
from headrace.sampling.sampler import token_logprobs


class Candidate(NamedTuple):
    """A beam with one more token. Candidates sort best first: equal totals by beam, then by
    token.
    """

    loss: float  # the total, negated
    beam: int
    token: int


class Hypothesis(NamedTuple):
    """A finished beam."""

    score: float
    output: OutputView


@dataclass(slots=True, eq=False)
class BeamSearch:
    """The beam search of one request. Its drawings, and the sequences that it accepts, are in the
    order of the beams, best first.
    """

    width: int
    num_results: int
    length_penalty: float
    early_stopping: bool
    num_end_ids: int
    """Number of tokens that may end a beam: each beam has so many candidates more than can go on,
    and still more with stop strings.
    """
    needs_logits: bool
    """Whether there are stop strings, or log-probabilities are asked for; otherwise the top tokens
    of each row are enough.
    """
    totals: list[float] = field(default_factory=lambda: [0.0])
    """Totals of the live beams, best first."""
    finished: list[Hypothesis] = field(default_factory=list)
    """At most `width` finished beams, best first; of equal scores the earlier first."""
    is_group = True

    def logit_ops(self, drawings: list[Drawing]) -> list[LogitOp]:
        """The top tokens of each beam."""
        assert len(drawings) == len(self.totals), "all beams draw together"
        if (
            drawings[0].output.token_ids
        ):  # the samplers have not seen the tokens that the last step of the search chose
            for drawing in drawings:
                drawing.sampler.append(drawing.known[-1])
        return self._top_tokens(drawings, self.width + self.num_end_ids)

    def accept(
        self,
        drawings: list[Drawing],
        values: Sequence[LogitOpResult],
        logits: NDArray[np.float32] | None,
    ) -> list[Accepted]:
        """The beams with one more token; none when the search has ended."""
        count = self.width + self.num_end_ids
        while None not in values:
            candidates = self._candidates(cast(Sequence[Ranked], values))
            if (accepted := self._select(candidates, drawings, logits, count)) is not None:
                if not accepted and not self.finished:
                    break
                return accepted
            assert logits is not None, "a search with stop strings asks for logits"
            count *= 2
            values = run_logit_ops(self._top_tokens(drawings, count), logits)
        return [Accepted(i, None) for i in range(len(drawings))]

    def outputs(self, outputs: list[AnyOutput]) -> list[AnyOutput]:
        """The best `num_results`, once all beams have ended; beams that were cut short are compared
        with finished ones.
        """
        if any(output.finish_reason is None for output in outputs):
            return []
        cut_short = list(map(self._hypothesis, outputs, self.totals))
        best = sorted([*self.finished, *cut_short], key=lambda hypothesis: -hypothesis.score)
        return [
            cast(AnyOutput, hypothesis.output) for hypothesis in best[: self.num_results]
        ]  # finished ones are clones of such outputs

    def _top_tokens(self, drawings: list[Drawing], count: int) -> list[LogitOp]:
        return [
            TopTokens(drawing.row, drawing.position, drawing.sampler, count, drawing.masks)
            for drawing in drawings
        ]

    def _candidates(self, ranked: Sequence[Ranked]) -> list[Candidate]:
        """The candidates of all beams, best first."""
        return sorted(
            Candidate(-total - logprob, beam, token)
            for beam, (total, row) in enumerate(zip(self.totals, ranked, strict=True))
            for token, logprob in zip(*row, strict=True)
            if logprob > -np.inf  # a banned token
        )

    def _select(
        self,
        candidates: list[Candidate],
        drawings: list[Drawing],
        logits: NDArray[np.float32] | None,
        count: int,
    ) -> list[Accepted] | None:
        """Finish those of the best `width` candidates that end, and accept the best `width` that do
        not end.

        Candidates that end but are not among the best `width` are dropped: better ones go on.
        Returns None, with nothing changed, if stop strings end so many that more than `count`
        candidates of a beam are needed.
        """
        accepted: list[Accepted] = []
        totals: list[float] = []
        finished = self.finished[:]
        unseen = [count] * len(drawings)
        for rank, (loss, beam, token) in enumerate(candidates):
            drawing = drawings[beam]
            logprobs = _logprobs(drawing, token, logits)
            output = drawing.output.clone()
            try:
                output.push(token, logprobs[0] if logprobs else None)
            except ConstraintError:  # nothing could follow
                continue
            if output.finish_reason is None:
                accepted.append(Accepted(beam, Commit(drawing.source, [], [token], logprobs)))
                totals.append(-loss)
            elif rank < self.width:
                insort(
                    finished,
                    self._hypothesis(output, -loss),
                    key=lambda hypothesis: -hypothesis.score,
                )
            if len(accepted) == self.width or (
                rank >= self.width - 1 and output.finish_reason == "length"
            ):
                break
            unseen[beam] -= 1
            if not unseen[beam] and logits is not None and count < logits.shape[1]:
                return None
        if not accepted and not finished:
            return []  # no token that any beam could have leads anywhere
        self.finished = finished[: self.width]
        self.totals = [] if self._ends(totals, len(drawings[0].output.token_ids) + 1) else totals
        return accepted if self.totals else []

    def _hypothesis(self, output: AnyOutput, total: float) -> Hypothesis:
        output.cumulative_logprob = total
        return Hypothesis(self._score(total, len(output.token_ids)), output)

    def _score(self, total: float, length: int) -> float:
        return float(total / max(length, 1) ** self.length_penalty)

    def _ends(self, totals: list[float], length: int) -> bool:
        """Whether the search ends: no beam goes on, or `width` beams are finished.

        Without early stopping, the best live beam must also score no more than the worst finished
        one. It is scored at its present length, although its score may rise with its length later.
        """
        full = len(self.finished) == self.width
        return not totals or (
            full
            and (self.early_stopping or self._score(totals[0], length) <= self.finished[-1].score)
        )


def _logprobs(
    drawing: Drawing, token: int, logits: NDArray[np.float32] | None
) -> list[TokenLogprobs]:
    """The log-probabilities of a token in a list of one, or an empty list where they are not asked
    for.
    """
    if drawing.num_logprobs < 0:
        return []
    assert logits is not None, "a search with log-probabilities asks for logits"
    return [token_logprobs(logits[drawing.row], token, drawing.num_logprobs)]
