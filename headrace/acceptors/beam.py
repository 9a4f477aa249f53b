"""Beam search, as in Hugging Face transformers.

Beams are ranked by total / length ** length_penalty (Wu et al. 2016, without their constant 5).
Native code finds the best continuations of all beams at once (csrc/beams.h).
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from headrace.acceptors import AnyOutput, AnySequence, OutputView, SampledSequence
from headrace.batch import Commit, TokenLogprobs
from headrace.constraint import TriePlace
from headrace.errors import ConstraintError
from headrace.logit_ops import LogitOp, LogitOpResult, RankBeams, RankedBeams
from headrace.sampling.host import run_logit_ops
from headrace.sampling.sampler import token_logprobs


class Hypothesis(NamedTuple):
    score: float
    output: OutputView


def _best_first(hypothesis: Hypothesis) -> float:
    return -hypothesis.score


@dataclass(slots=True, eq=False)
class BeamSearch:
    """The beam search of one request. Its sequences are in the order of the beams.

    A total sums log-probabilities after biases and penalties, at temperature 1. Grammars and tries
    choose among the tokens, and do not change their log-probabilities.
    """

    width: int
    num_results: int
    length_penalty: float
    early_stopping: bool
    end_ids: list[int]
    """Tokens that end a beam."""
    has_stops: bool
    """Whether stop strings may end a beam."""
    needs_logits: bool
    """Whether the search may rank more candidates, or returns log-probabilities."""
    totals: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Hypothesis] = field(default_factory=list)
    """Finished beams, best first."""
    must_try: bool = False
    """Whether only the output of a candidate of this step can tell if it ends."""
    is_group = True

    def logit_ops(self, seqs: list[AnySequence]) -> list[LogitOp]:
        assert len(seqs) == len(self.totals), "all beams sample in the same step"

        # `accept` of the last step chose the newest tokens, so the samplers have not seen them.
        if seqs[0].output.token_ids:
            for seq in seqs:
                seq.sampler.append(seq.output.token_ids[-1])
        return [self._rank(seqs, self.width)]

    def accept(
        self,
        seqs: list[AnySequence],
        results: Sequence[LogitOpResult],
        logits: NDArray[np.float32] | None,
    ) -> list[tuple[AnySequence, Commit | None]]:
        count, (result,) = self.width, results
        while isinstance(result, RankedBeams):
            accepted = self._select(result, seqs, logits, count)
            if accepted is not None:
                if not accepted and not self.finished:
                    break
                return accepted

            # Stop strings or a grammar ended too many candidates: rank twice as many.
            assert logits is not None, "a search with stop strings or a grammar needs the logits"
            count *= 2
            (result,) = run_logit_ops([self._rank(seqs, count)], logits)
        return [(seq, None) for seq in seqs]

    def outputs(self, outputs: list[AnyOutput]) -> list[AnyOutput]:
        if any(output.finish_reason is None for output in outputs):
            return []
        cut_short = list(map(self._hypothesis, outputs, self.totals))
        ranked = sorted([*self.finished, *cut_short], key=_best_first)

        # The outputs of finished beams are clones of such outputs, hence of their type.
        return [cast(AnyOutput, hypothesis.output) for hypothesis in ranked[: self.num_results]]

    def _rank(self, seqs: Sequence[SampledSequence], count: int) -> RankBeams:
        places, constraint = _places(seqs), seqs[0].output.constraint
        self.must_try = self.has_stops or bool(constraint and constraint.changes and not places)
        masks = [] if places else [seq.masks for seq in seqs if seq.masks is not None]
        return RankBeams(
            rows=[seq.first_sample_row for seq in seqs],
            position=seqs[0].position,
            samplers=[seq.sampler for seq in seqs],
            totals=self.totals,
            num_candidates=count,
            all_count=seqs[0].output.num_left == 1,
            end_ids=self.end_ids,
            masks=np.concatenate(masks) if masks else None,
            trie=places[0].trie if places else None,
            nodes=[place.node for place in places],
        )

    def _select(
        self,
        ranked: RankedBeams,
        seqs: list[AnySequence],
        logits: NDArray[np.float32] | None,
        count: int,
    ) -> list[tuple[AnySequence, Commit | None]] | None:
        """Finish the ending candidates among the best `width`; accept the best `width` others.

        Returns None, and changes no state, if more than `count` candidates are needed.
        """
        accepted: list[tuple[AnySequence, Commit | None]] = []
        totals: list[float] = []
        finished = self.finished[:]
        length = len(seqs[0].output.token_ids) + 1
        is_last = seqs[0].output.num_left == 1
        must_try = self.must_try

        for rank, (beam, token, total, ends) in enumerate(zip(*ranked, strict=True)):
            ended = not must_try and (ends or is_last)
            if ended and rank >= self.width:
                continue
            seq = seqs[beam]
            logprobs = _logprobs(seq, token, logits)
            if must_try:
                output = seq.output.clone()
                try:
                    output.push(token, logprobs[0] if logprobs else None)
                except ConstraintError:  # the grammar allows no token after this one
                    continue
                ended = output.finish_reason is not None

            if not ended:
                accepted.append((seq, Commit(seq.source, [], tokens=[token], logprobs=logprobs)))
                totals.append(total)
                if len(accepted) == self.width:
                    break
            elif rank < self.width and self._is_among_best(finished, total, length):
                if not must_try:
                    output = seq.output.clone()
                    output.push(token, logprobs[0] if logprobs else None)
                insort(finished, self._hypothesis(output, total), key=_best_first)
                del finished[self.width :]

        num_counted = len(ranked.ends) if is_last else ranked.ends.count(False)
        if must_try and not is_last and len(accepted) < self.width and num_counted == count:
            return None
        if not accepted and not finished:
            return []  # the grammar ends every beam without a valid output
        self.finished = finished
        self.totals = [] if self._ends(totals, length) else totals
        return accepted if self.totals else []

    def _is_among_best(self, finished: list[Hypothesis], total: float, length: int) -> bool:
        if len(finished) < self.width:
            return True
        return self._score(total, length) > finished[-1].score

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


def _places(seqs: Sequence[SampledSequence]) -> list[TriePlace]:
    """The place of each beam in a trie; none if anything else decides about the next token."""
    places: list[TriePlace] = []
    for seq in seqs:
        constraint = seq.output.constraint
        place = None if constraint is None else constraint.place
        if place is None:
            return []
        places.append(place)
    return places


def _logprobs(
    seq: SampledSequence, token: int, logits: NDArray[np.float32] | None
) -> list[TokenLogprobs]:
    if seq.num_logprobs < 0:
        return []
    assert logits is not None, "a search with log-probabilities needs the logits"
    return [token_logprobs(logits[seq.first_sample_row], token, seq.num_logprobs)]
