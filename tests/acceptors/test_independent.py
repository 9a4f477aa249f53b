"""Sequences that go on by themselves."""

from headrace import _native
from headrace.acceptors import Drawing
from headrace.acceptors.independent import IndependentAcceptor
from headrace.batch import NO_DRAFT, Commit, DraftTree, TokenLogprobs
from headrace.engine.output import Output
from headrace.logit_ops import SampleOp, SampleResult
from headrace.request import SamplingParams
from tests.tiny import TinyVocabulary


def drawing(source: int, row: int, draft: DraftTree, num_logprobs: int) -> Drawing:
    output = Output(SamplingParams(), TinyVocabulary(4), [], 9)
    return Drawing(
        source, row, 7 + row, [1, 2], _native.Sampler(4, []), draft, num_logprobs, output
    )


DRAWINGS = [drawing(3, 0, DraftTree([1, 2], [-1, 0]), -1), drawing(1, 3, NO_DRAFT, 2)]


def test_each_is_drawn_by_the_method() -> None:
    draws = IndependentAcceptor("typical").logit_ops(DRAWINGS)
    assert draws == [
        SampleOp(d.row, d.position, d.sampler, d.draft, d.num_logprobs, "typical") for d in DRAWINGS
    ]


def test_each_keeps_what_it_drew_and_fails_without_finite_logits() -> None:
    logprobs = [TokenLogprobs(-0.5, 1, [], []), TokenLogprobs(-1.5, 2, [], [])]
    accepted = IndependentAcceptor("exact").accept(
        DRAWINGS, [SampleResult([1, 3], [0], logprobs), None], None
    )
    assert accepted == [(0, Commit(3, [0], [1, 3], logprobs)), (1, None)]


def test_all_outputs_are_shown() -> None:
    outputs = [d.output for d in DRAWINGS]
    assert IndependentAcceptor("exact").outputs(outputs) == outputs
