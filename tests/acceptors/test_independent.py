"""The acceptor of independent sequences."""

from headrace import _native
from headrace.acceptors.independent import IndependentAcceptor
from headrace.batch import NO_DRAFT, Commit, DraftTree, TokenLogprobs
from headrace.engine.output import Output
from headrace.logit_ops import SampleOp, SampleResult
from headrace.sampling_params import SamplingParams
from tests.acceptors.sampled import Sampled
from tests.tiny import TinyVocabulary


def sampled(source: int, row: int, draft: DraftTree, num_logprobs: int) -> Sampled:
    output = Output(SamplingParams(), TinyVocabulary(4), [], 9)
    return Sampled(
        source=source,
        first_sample_row=row,
        position=7 + row,
        sampler=_native.Sampler(4, []),
        output=output,
        draft=draft,
        num_logprobs=num_logprobs,
    )


SEQS = [sampled(3, 0, DraftTree([1, 2], [-1, 0]), -1), sampled(1, 3, NO_DRAFT, 2)]


def test_each_sequence_is_sampled_by_the_method() -> None:
    ops = IndependentAcceptor("typical").logit_ops(SEQS)
    assert ops == [
        SampleOp(
            row=seq.first_sample_row,
            position=seq.position,
            sampler=seq.sampler,
            draft=seq.draft,
            num_logprobs=seq.num_logprobs,
            method="typical",
        )
        for seq in SEQS
    ]


def test_each_sequence_keeps_its_tokens_and_fails_without_finite_logits() -> None:
    logprobs = [TokenLogprobs(-0.5, 1, [], []), TokenLogprobs(-1.5, 2, [], [])]
    accepted = IndependentAcceptor("exact").accept(
        SEQS, [SampleResult([1, 3], [0], logprobs), None], None
    )
    assert accepted == [(SEQS[0], Commit(3, [0], [1, 3], logprobs)), (SEQS[1], None)]


def test_all_outputs_are_shown() -> None:
    outputs = [seq.output for seq in SEQS]
    assert IndependentAcceptor("exact").outputs(outputs) == outputs
