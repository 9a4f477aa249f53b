"""A beam search step by step, on given rows of logits."""

from typing import Any

import numpy as np
import pytest

from headrace import _native
from headrace.acceptors.beam import BeamSearch
from headrace.engine.output import Output
from headrace.engine.stops import StopPattern
from headrace.sampling.host import run_logit_ops
from headrace.sampling_params import SamplingParams
from tests.acceptors.sampled import Sampled
from tests.tiny import TinyVocabulary

END = 3


class Searching:
    """A search and its live beams."""

    def __init__(
        self,
        num_end_ids: int = 1,
        num_results: int = 2,
        max_tokens: int = 9,
        presence_penalty: float = 0.0,
        **options: Any,
    ) -> None:
        params = SamplingParams(
            beam_width=2,
            n=num_results,
            stop_token_ids=[END][:num_end_ids],
            max_tokens=max_tokens,
            **options,
        )
        needs_logits = bool(params.stop) or params.logprobs is not None
        self.search = BeamSearch(
            width=2,
            num_results=num_results,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            end_ids=[END][:num_end_ids],
            has_stops=bool(params.stop),
            needs_logits=needs_logits,
        )
        self.num_logprobs = -1 if params.logprobs is None else params.logprobs
        patterns = [StopPattern(stop) for stop in params.stop or ()]
        self.beams = [([0], Output(params, TinyVocabulary(4), patterns, max_tokens))]
        self.samplers = [_native.Sampler(4, [], temperature=0.0, presence_penalty=presence_penalty)]

    def step(self, *probabilities: list[float]) -> list[list[int]]:
        """Run a step with these probabilities for each beam; returns the outputs of the live
        beams.
        """
        with np.errstate(divide="ignore"):
            logits = np.log(np.array(probabilities, np.float32))
        seqs = [
            Sampled(
                source=i + 4,
                first_sample_row=i,
                position=len(known),
                sampler=sampler,
                output=output,
                num_logprobs=self.num_logprobs,
            )
            for i, ((known, output), sampler) in enumerate(
                zip(self.beams, self.samplers, strict=True)
            )
        ]
        results = run_logit_ops(self.search.logit_ops(seqs), logits)
        beams, samplers = [], []
        for seq, commit in self.search.accept(
            seqs, results, logits if self.search.needs_logits else None
        ):
            which = seqs.index(seq)
            assert commit is not None and (commit.source, commit.path, len(commit.logprobs)) == (
                which + 4,
                [],
                self.num_logprobs >= 0,
            )
            known, output = self.beams[which]
            successor = output.clone()
            successor.push(commit.tokens[0], commit.logprobs[0] if commit.logprobs else None)
            beams.append(([*known, *commit.tokens], successor))
            samplers.append(self.samplers[which].clone(0))
        self.beams, self.samplers = beams, samplers
        return [output.token_ids for _, output in beams]

    @property
    def finished(self) -> list[list[int]]:
        return [output.token_ids for _, output in self.search.finished]


def test_equal_totals_go_by_beam_then_by_token() -> None:
    search = Searching()
    assert search.step([0.25] * 4) == [[0], [1]]
    assert search.step([0.25] * 4, [0.25] * 4) == [[0, 0], [0, 1]]


def test_both_beams_may_continue_the_same_beam() -> None:
    search = Searching()
    assert search.step([0.6, 0.3, 0.1, 0]) == [[0], [1]]
    assert search.step([0.5, 0.5, 0, 0], [0.2, 0.4, 0.4, 0]) == [[0, 0], [0, 1]]


def test_only_the_best_candidates_may_finish() -> None:
    search = Searching()
    assert search.step([0.5, 0.2, 0.1, 0.2]) == [
        [0],
        [1],
    ]  # the end token is third, so it is dropped
    assert search.finished == []
    assert search.step([0.3, 0.05, 0.05, 0.6], [0.4, 0.3, 0.2, 0.1]) == [[0, 0], [1, 0]]
    assert search.finished == [[0, END]]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "num_live"),
    [(True, 1.0, 0), (False, 0.0, 0), (False, 2.0, 2)],
)
def test_a_search_ends_by_early_stopping_and_length_penalty(
    early_stopping: bool, length_penalty: float, num_live: int
) -> None:
    """With a length penalty of 2 the longer live beam scores above the finished one of half its
    length.
    """
    search = Searching(early_stopping=early_stopping, length_penalty=length_penalty)
    assert search.step([0.4, 0.1, 0.02, 0.48]) == [[0], [1]]
    assert search.finished == [[END]]
    assert len(search.step([0.48, 0.02, 0, 0.5], [0.5, 0.5, 0, 0])) == num_live
    assert sorted(search.finished) == [[0, END], [END]]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_a_live_beam_that_is_only_as_good_as_all_finished_ones_ends_a_search(
    length_penalty: float,
) -> None:
    search = Searching(length_penalty=length_penalty)
    assert search.step([0.25, 0.25, 0, 0.5]) == [[0], [1]]
    assert search.step([0.5, 0, 0, 0.5], [0.4, 0.3, 0.3, 0]) == []
    assert search.finished == [[END], [0, END]]


def test_a_search_ranks_more_candidates_if_stop_strings_end_all() -> None:
    """The fourth candidate of the first beam beats all of the second beam, after its second and
    third have ended.
    """
    search = Searching(stop=["ab", "ac"], num_end_ids=0)
    assert search.step([0.98, 0.02, 0, 0]) == [[0], [1]]
    assert search.step([0.3, 0.25, 0.25, 0.2], [0.4, 0.3, 0.2, 0.1]) == [[0, 0], [0, 3]]
    assert search.finished == [[0, 1]]


def test_a_search_ranks_more_candidates_with_end_tokens() -> None:
    search = Searching(stop=["ab"])
    assert search.step([0.98, 0.02, 0, 0]) == [[0], [1]]
    assert search.step([0.2, 0.3, 0.27, 0.23], [0.4, 0.3, 0.2, 0.1]) == [[0, 2], [0, 0]]
    assert search.finished == [[0, 1]]


def test_a_search_ends_if_stop_strings_end_everything() -> None:
    search = Searching(stop=["a", "b", "c", "d"], num_end_ids=0)
    assert search.step([0.4, 0.3, 0.2, 0.1]) == []
    assert search.finished == [[0], [1]]


def test_a_row_that_is_not_finite_fails_all_beams() -> None:
    search = Searching()
    search.step([0.6, 0.3, 0.1, 0])
    seqs = [
        Sampled(source=i, first_sample_row=i, position=2, sampler=search.samplers[i], output=output)
        for i, (_, output) in enumerate(search.beams)
    ]
    logits = np.array([[0, 0, 0, 0], [0, np.nan, 0, 0]], np.float32)
    results = run_logit_ops(search.search.logit_ops(seqs), logits)
    assert search.search.accept(seqs, results, None) == [
        (seqs[0], None),
        (seqs[1], None),
    ]


def test_the_outputs_of_a_search() -> None:
    """The outputs come at the end, with the totals of their ranking; beams that were cut short
    compete with finished ones.
    """
    search = Searching(num_results=1, length_penalty=0.0)
    search.step([0.3, 0.2, 0, 0.5])
    live = [output for _, output in search.beams]
    assert search.search.outputs(live) == []
    for output in live:
        output.finish("abort")
    (best,) = search.search.outputs(live)
    assert best.token_ids == [END] and best.cumulative_logprob == pytest.approx(np.log(0.5))
    search.search.num_results = 3
    assert [output.token_ids for output in search.search.outputs(live)] == [[END], [0], [1]]
    assert [output.cumulative_logprob for output in live] == pytest.approx(np.log([0.3, 0.2]))


@pytest.mark.parametrize("logprobs", [0, 1])
def test_log_probabilities_of_each_token(logprobs: int) -> None:
    search = Searching(logprobs=logprobs)
    search.step([0.6, 0.3, 0.1, 0])
    search.step([0.5, 0.3, 0, 0.2], [0.25, 0.25, 0.25, 0.25])
    described = [
        [next(iter(position.values())) for position in output.logprobs]
        for _, output in search.beams
    ]
    assert [[round(float(np.exp(one.logprob)), 3) for one in beam] for beam in described] == [
        [0.6, 0.5],
        [0.6, 0.3],
    ]
    assert [[one.rank for one in beam] for beam in described] == [[1, 1], [1, 2]]
    search.step([0.2, 0, 0, 0.8], [0.5, 0.5, 0, 0])
    ((_, finished),) = search.search.finished
    assert [next(iter(position.values())).rank for position in finished.logprobs] == [1, 1, 1]


def test_penalties_see_the_last_token() -> None:
    """In the third step the penalty suppresses the second token of each beam."""
    search = Searching(presence_penalty=50.0)
    assert search.step([0.4, 0.3, 0.2, 0.1]) == [[0], [1]]
    assert search.step([0.7, 0.2, 0.1, 0], [0.2, 0.7, 0.1, 0]) == [[0, 1], [1, 0]]
    assert search.step([0.6, 0.3, 0.1, 0], [0.6, 0.3, 0.1, 0]) == [[0, 1, 2], [1, 0, 2]]


def test_beams_end_at_the_limit() -> None:
    search = Searching(max_tokens=1)
    assert search.step([0.4, 0.3, 0.2, 0.1]) == []
    assert (
        search.finished == [[0], [1]] and search.search.finished[0].output.finish_reason == "length"
    )


def test_there_are_no_more_beams_than_candidates() -> None:
    search = Searching()
    assert search.step([1, 0, 0, 0]) == [[0]]
    assert search.step([0.5, 0.5, 0, 0]) == [[0, 0], [0, 1]]
