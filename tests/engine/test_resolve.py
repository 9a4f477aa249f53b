"""The commits of a step: several launches as one result, and prompt chunks."""

from headrace.batch import TokenLogprobs
from headrace.engine.resolve import _concatenate
from headrace.logit_ops import SampleResult
from headrace.sampling_params import SamplingParams
from tests.engine.toy import VOCAB, plain_decoding, toy_engine
from tests.random_trees import RandomTrees
from tests.tiny import run_all


def test_tokens_of_several_launches_are_joined() -> None:
    first, second = (
        SampleResult([token], [], [TokenLogprobs(-1.0 * token, 1, [], [])]) for token in (4, 5)
    )
    assert _concatenate([first, second]) == SampleResult(
        [4, 5], [], first.logprobs + second.logprobs
    )


def test_tokens_after_non_finite_logits_are_dropped() -> None:
    first, second = SampleResult([4], [], []), SampleResult([5], [], [])
    assert _concatenate([first, None, second]) == first
    assert _concatenate([None, first]) is None and _concatenate([None]) is None


def test_a_prompt_chunk_has_an_empty_commit() -> None:
    proposer, params = (
        RandomTrees(0, VOCAB, {}, max_nodes=4),
        SamplingParams(temperature=0, max_tokens=6),
    )
    engine = toy_engine(proposer=proposer, max_num_batched_tokens=8)
    prompts = [[1], [2] * 20]
    for prompt, result in zip(
        prompts, run_all(engine, [(prompt, params) for prompt in prompts]), strict=True
    ):
        assert prompt + result.outputs[0].token_ids == plain_decoding(prompt, params, 0)
    chunks = [commit[:4] for commit in proposer.commits if not commit.tokens]
    assert (
        engine.stats().drafted
        and chunks
        and all(chunk in ((0, [], [], []), (1, [], [], [])) for chunk in chunks)
    )
