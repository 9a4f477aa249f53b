"""Beam search, as in Hugging Face transformers.

Beams are ranked by total / length ** length_penalty (Wu et al. 2016, without their constant 5).
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from headrace.acceptors import AnyOutput, AnySequence, OutputView, SampledSequence
from headrace.batch import Commit, TokenLogprobs
from headrace.errors import ConstraintError
from headrace.logit_ops import LogitOp, LogitOpResult, Ranked, TopTokens
from headrace.sampling.host import run_logit_ops
from headrace.sampling.sampler import token_logprobs


class Candidate(NamedTuple):
    """A beam with one more token. Best first; equal totals by beam, then by token."""

    loss: float  # the negated total
    beam: int
    token: int


class Hypothesis(NamedTuple):
    score: float
    output: OutputView


@dataclass(slots=True, eq=False)
class BeamSearch:
    """The beam search of one request. Its sequences are in the order of the beams.

    A total sums log-probabilities after biases and penalties, at temperature 1.
    """

    width: int
    num_results: int
    length_penalty: float
    early_stopping: bool
    num_end_ids: int
    """Tokens that may end a beam. A step ranks this number of extra tokens of each beam, so that
    `width` beams continue.
    """
    needs_logits: bool
    """Whether the request has stop strings or returns log-probabilities."""
    totals: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Hypothesis] = field(default_factory=list)
    """Finished beams, best first."""
    is_group = True

    def logit_ops(self, seqs: list[AnySequence]) -> list[LogitOp]:
        assert len(seqs) == len(self.totals), "all beams sample in the same step"

        # `accept` of the last step chose the newest tokens, so the samplers have not seen them.
        if seqs[0].output.token_ids:
            for seq in seqs:
                seq.sampler.append(seq.output.token_ids[-1])
        return self._top_tokens(seqs, self.width + self.num_end_ids)

    def accept(
        self,
        seqs: list[AnySequence],
        results: Sequence[LogitOpResult],
        logits: NDArray[np.float32] | None,
    ) -> list[tuple[AnySequence, Commit | None]]:
        count = self.width + self.num_end_ids
        while None not in results:
            candidates = self._candidates(cast(Sequence[Ranked], results))
            accepted = self._select(candidates, seqs, logits, count)
            if accepted is not None:
                if not accepted and not self.finished:
                    break
                return accepted

            # Stop strings ended too many candidates: rank twice as many tokens of each beam.
            assert logits is not None, "a search with stop strings needs the logits"
            count *= 2
            results = run_logit_ops(self._top_tokens(seqs, count), logits)
        return [(seq, None) for seq in seqs]

    def outputs(self, outputs: list[AnyOutput]) -> list[AnyOutput]:
        if any(output.finish_reason is None for output in outputs):
            return []
        cut_short = list(map(self._hypothesis, outputs, self.totals))
        ranked = sorted([*self.finished, *cut_short], key=lambda hypothesis: -hypothesis.score)

        # The outputs of finished beams are clones of such outputs, hence of their type.
        return [cast(AnyOutput, hypothesis.output) for hypothesis in ranked[: self.num_results]]

    def _top_tokens(self, seqs: Sequence[SampledSequence], count: int) -> list[LogitOp]:
        return [
            TopTokens(
                row=seq.first_sample_row,
                position=seq.position,
                sampler=seq.sampler,
                num_tokens=count,
                masks=seq.masks,
            )
            for seq in seqs
        ]

    def _candidates(self, ranked: Sequence[Ranked]) -> list[Candidate]:
        return sorted(
            Candidate(-total - logprob, beam, token)
            for beam, (total, row) in enumerate(zip(self.totals, ranked, strict=True))
            for token, logprob in zip(row.tokens, row.logprobs, strict=True)
            if logprob > -np.inf  # a banned token
        )

    def _select(
        self,
        candidates: list[Candidate],
        seqs: list[AnySequence],
        logits: NDArray[np.float32] | None,
        count: int,
    ) -> list[tuple[AnySequence, Commit | None]] | None:
        """Finish the ending candidates among the best `width`; accept the best `width` others.

        Returns None, and changes no state, if a beam needs more than `count` candidates.
        """
        accepted: list[tuple[AnySequence, Commit | None]] = []
        totals: list[float] = []
        finished = self.finished[:]
        num_unseen = [count] * len(seqs)

        for rank, (loss, beam, token) in enumerate(candidates):
            seq = seqs[beam]
            logprobs = _logprobs(seq, token, logits)
            output = seq.output.clone()
            try:
                output.push(token, logprobs[0] if logprobs else None)
            except ConstraintError:  # the grammar allows no token after this one
                continue

            if output.finish_reason is None:
                commit = Commit(seq.source, path=[], tokens=[token], logprobs=logprobs)
                accepted.append((seq, commit))
                totals.append(-loss)
            elif rank < self.width:
                hypothesis = self._hypothesis(output, -loss)
                insort(finished, hypothesis, key=lambda hypothesis: -hypothesis.score)

            all_at_limit = rank >= self.width - 1 and output.finish_reason == "length"
            if len(accepted) == self.width or all_at_limit:
                break
            num_unseen[beam] -= 1
            if not num_unseen[beam] and logits is not None and count < logits.shape[1]:
                return None

        if not accepted and not finished:
            return []  # the grammar ends every beam without a valid output
        self.finished = finished[: self.width]
        self.totals = [] if self._ends(totals, len(seqs[0].output.token_ids) + 1) else totals
        return accepted if self.totals else []

    def _hypothesis(self, output: AnyOutput, total: float) -> Hypothesis:
        output.cumulative_logprob = total
        return Hypothesis(self._score(total, len(output.token_ids)), output)

    def _score(self, total: float, length: int) -> float:
        return float(total / max(length, 1) ** self.length_penalty)

    def _ends(self, totals: list[float], length: int) -> bool:
        """Whether no beam continues, or `width` beams are finished.

        Without early stopping, no live beam may score better at its present length.
        """
        if not totals:
            return True
        if len(self.finished) < self.width:
            return False
        return self.early_stopping or self._score(totals[0], length) <= self.finished[-1].score


def _logprobs(
    seq: SampledSequence, token: int, logits: NDArray[np.float32] | None
) -> list[TokenLogprobs]:
    if seq.num_logprobs < 0:
        return []
    assert logits is not None, "a search with log-probabilities needs the logits"
    return [token_logprobs(logits[seq.first_sample_row], token, seq.num_logprobs)]
