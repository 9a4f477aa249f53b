"""Requests that another engine resumes after some tokens: the rest equals the undisturbed run, bit
for bit.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.engine import Engine
from headrace.errors import RequestError
from headrace.outputs import Logprobs, RequestOutput, Update
from headrace.request import PoolingParams
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputs
from tests.engine.test_promise import truth
from tests.engine.test_structured import GRAMMAR, REGEX, SCHEMA
from tests.json_vocabulary import EOS, VOCAB, JsonVocabulary
from tests.random_trees import RandomTrees
from tests.tiny import drain, run_all, tiny_engine, tiny_model

MODEL = tiny_model(3, vocab=VOCAB, context=96)
GRAMMARS = [
    None,
    None,
    None,
    {"json": SCHEMA},
    {"regex": REGEX},
    {"grammar": GRAMMAR},
    {"choice": ["abc", "ab", "name", "null and true"]},
]


def engine(**options: Any) -> Engine:
    return tiny_engine(MODEL, "cpu", vocabulary=JsonVocabulary(), eos_ids=EOS, **options)


@cache
def undisturbed() -> Engine:
    """Run the request in steps of one token, so that the updates show every state."""
    return engine(jump_forward=False, slots=512)


@pytest.fixture(scope="module", autouse=True)
def undisturbed_is_freed() -> Iterator[None]:
    """The interpreter would count a native plan that a cache holds as a leak."""
    yield
    undisturbed.cache_clear()


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    grammar = draw(st.sampled_from(GRAMMARS))
    most = draw(st.integers(1, 40))
    params: dict[str, Any] = {
        "n": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 5)),
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.0, 1.5])),
        "top_p": draw(st.sampled_from([1.0, 0.9])),
        "max_tokens": most,
        "min_tokens": draw(st.integers(0, most)) if draw(st.booleans()) else 0,
        "logprobs": draw(st.sampled_from([None, 0, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.8])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.5])),
        "logit_bias": draw(
            st.sampled_from([None, {59: 3.0}, {57: 4.0, 58: 4.0}])
        ),  # an end token; the two bytes of one character
        "stop": draw(st.lists(st.text("abmn1,", min_size=1, max_size=3), max_size=3)),
        "stop_token_ids": draw(st.sampled_from([None, [7]])),
        "include_stop_str_in_output": draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
        "bad_words": draw(st.sampled_from([None, None, ["ab", "m1"]])) if grammar is None else None,
        "structured_outputs": StructuredOutputs(**grammar) if grammar else None,
    }
    return draw(st.lists(st.integers(0, 40), min_size=1, max_size=20)), SamplingParams(**params)


def run(
    engine: Engine, prompt: list[int], params: SamplingParams, given: list[list[int]]
) -> tuple[RequestOutput, list[Update]]:
    """Return the result of a request, and its updates."""
    engine.add_request(prompt, params, output_token_ids=given)
    updates = drain(engine)
    (result,) = [update.result for update in updates if update.result]
    return result, updates


def told(updates: list[Update], index: int, count: int) -> tuple[str, list[Logprobs]]:
    """Return the updates of one output up to some number of tokens."""
    text, tokens, logprobs = "", 0, list[Logprobs]()
    for update in updates:
        if update.index == index and tokens < count:
            text, tokens, logprobs = (
                text + update.text,
                tokens + len(update.token_ids),
                logprobs + update.logprobs,
            )
    assert tokens == count
    return text, logprobs


@settings(max_examples=250, deadline=None)
@given(
    asked=requests(),
    data=st.data(),
    options=st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.sampled_from([1, 3, 8, 64]),
            "max_num_seqs": st.sampled_from([1, 2, 32]),
            "chunked_prefill_size": st.sampled_from([1, 5, 32]),
            "multi_step_ms": st.sampled_from([0, 1e6]),
            "slots": st.sampled_from([96, 128, 512]),
            "prefix_cache": st.booleans(),
            "late": st.booleans(),
            "batching": st.sampled_from(["inflight", "inflight", "static"]),
        }
    ),
    drafts=st.booleans(),
)
def test_a_resumed_request_generates_the_same_rest(
    asked: tuple[list[int], SamplingParams],
    data: st.DataObject,
    options: dict[str, Any],
    drafts: bool,
) -> None:
    prompt, params = asked
    expected, updates = run(undisturbed(), prompt, params, [])
    if expected.error:  # the grammar or the bad words allow no token
        return
    lengths = [len(output.token_ids) for output in expected.outputs]
    cuts = [data.draw(st.integers(0, length), label="cut") for length in lengths]
    if cuts == lengths:
        cuts[data.draw(st.integers(0, params.n - 1))] = 0
    begun = [output.token_ids[:cut] for output, cut in zip(expected.outputs, cuts, strict=True)]
    other = engine(
        proposer=RandomTrees(data.draw(st.integers(0, 9)), VOCAB, truth([expected], [0]))
        if drafts
        else "off",
        **options,
    )
    try:
        result, rest = run(other, prompt, params, begun)
        for index, cut in enumerate(cuts):
            text, logprobs = told(updates, index, cut)
            mine = [update for update in rest if update.index == index]
            output = expected.outputs[index]
            assert (
                text + "".join(update.text for update in mine)
                == output.text
                == result.outputs[index].text
            )
            assert (
                begun[index] + [token for update in mine for token in update.token_ids]
                == output.token_ids
            )
            assert result.outputs[index].token_ids == output.token_ids
            assert logprobs + [one for update in mine for one in update.logprobs] == (
                output.logprobs or []
            )
            ends = [
                (update.finish_reason, update.stop_reason)
                for update in mine
                if update.finish_reason
            ]
            assert ends == (
                [] if cut == lengths[index] else [(output.finish_reason, output.stop_reason)]
            )
            assert (result.outputs[index].finish_reason, result.outputs[index].stop_reason) == (
                output.finish_reason,
                output.stop_reason,
            )
        assert result.prompt_logprobs == expected.prompt_logprobs
        stats = other.stats()
        assert stats.blocks_free == stats.blocks_total and not other.has_work
    finally:
        other.close()


def test_many_resumed_requests_and_a_failed_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the failed step they continue after the given tokens and their own."""
    asked = [
        (
            [1, 2, 3 + i],
            SamplingParams(seed=i, n=1 + i % 3, max_tokens=24, logprobs=1, ignore_eos=True),
        )
        for i in range(6)
    ]
    expected = run_all(undisturbed(), asked)
    other = engine(slots=256, max_num_seqs=5)
    cuts = [
        [output.token_ids[: 4 * i + output.index] for output in result.outputs]
        for i, result in enumerate(expected)
    ]
    ids = [
        other.add_request(*one, output_token_ids=cut) for one, cut in zip(asked, cuts, strict=True)
    ]
    updates = [update for _ in range(3) for update in other.step()]
    launch = other._loop.executable.launch
    with monkeypatch.context() as patch:
        patch.setattr(other._loop.executable, "launch", lambda *_, **__: launch(None, None))
        updates += other.step()
    updates += drain(other)
    assert other.stats().failed_steps == 1
    results = {update.request_id: update.result for update in updates if update.result}
    for request_id, cut, whole in zip(ids, cuts, expected, strict=True):
        result = results[request_id]
        assert [output.token_ids for output in result.outputs] == [
            output.token_ids for output in whole.outputs
        ]
        for output, begun in zip(whole.outputs, cut, strict=True):
            mine = [
                update
                for update in updates
                if (update.request_id, update.index) == (request_id, output.index)
            ]
            assert [token for update in mine for token in update.token_ids] == output.token_ids[
                len(begun) :
            ]
            assert [one for update in mine for one in update.logprobs] == (output.logprobs or [])[
                len(begun) :
            ]


PLAIN = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(
    ("params", "given", "said"),
    [
        (
            PLAIN,
            [[VOCAB]],
            f"output_token_ids has token {VOCAB}, but the vocabulary ends at {VOCAB - 1}",
        ),
        (PLAIN, [[-1]], r"output_token_ids\[0\] must be a whole number"),
        (PLAIN, [["a"]], r"output_token_ids\[0\] must be a whole number"),
        (PLAIN, ["ab"], r"output_token_ids\[0\] must be a list of token ids"),
        (PLAIN, [3], r"output_token_ids\[0\] must be a list of token ids"),
        (PLAIN, "ab", "output_token_ids must be a list of lists of token ids, not str"),
        (PLAIN, 7, "output_token_ids must be a list of lists of token ids, not int"),
        (
            PLAIN,
            [[1] * 5],
            r"output_token_ids\[0\] has 5 tokens, but at most 4 may follow the prompt",
        ),
        (PLAIN, [[1] * 10**6], r"output_token_ids\[0\] has 1,000,000 tokens"),
        (
            PLAIN,
            [[1], [2]],
            "output_token_ids has 2 lists, but n is 1; give one list for each output",
        ),
        (replace(PLAIN, n=2), [[1]], "output_token_ids has 1 lists, but n is 2"),
        (
            PLAIN,
            [[1, 2, 3, 4]],
            "output_token_ids is complete; at least one output must be unfinished",
        ),
        (
            replace(PLAIN, ignore_eos=False),
            [[1, EOS[0], 2]],
            r"output_token_ids\[0\] has 3 tokens, but the output ends after 2",
        ),
        (
            replace(PLAIN, stop=["}"]),
            [[1, 2]],
            r"output_token_ids\[0\] has 2 tokens, but the output ends after 1",
        ),
        (
            replace(PLAIN, structured_outputs=StructuredOutputs(regex="a+")),
            [[1]],
            r"output_token_ids\[0\] is not valid: the grammar cannot continue",
        ),
        (
            SamplingParams(beam_width=2),
            [[1]],
            "output_token_ids must be empty; a beam search always starts from its prompt",
        ),
    ],
)
def test_output_token_ids_that_are_refused(params: SamplingParams, given: Any, said: str) -> None:
    one = undisturbed()
    with pytest.raises(RequestError, match=said):
        one.add_request([1, 2], params, output_token_ids=given)
    assert not one.has_work


def test_an_embedding_has_no_output_token_ids() -> None:
    with pytest.raises(RequestError, match="an embedding always starts from its prompt"):
        undisturbed().check([1, 2], pooling=PoolingParams(), output_token_ids=[[1]])


def test_output_token_ids_are_limited_by_the_context() -> None:
    """Without `max_tokens` the given tokens must fit in the context."""
    one = undisturbed()
    with pytest.raises(
        RequestError,
        match=r"output_token_ids\[0\] has 95 tokens, but at most 94 may follow the prompt",
    ):
        one.add_request([1, 2], replace(PLAIN, max_tokens=None), output_token_ids=[[1] * 95])


def test_empty_output_token_ids_are_a_fresh_request() -> None:
    prompt, params = [5, 6], SamplingParams(seed=1, n=2, max_tokens=6)
    (expected,) = run_all(undisturbed(), [(prompt, params)])
    for nothing in ([], [[], []]):
        result, _ = run(undisturbed(), prompt, params, nothing)
        assert result.outputs == expected.outputs


def test_a_resumed_output_without_tokens_is_one_sequence() -> None:
    """If another output has tokens, it does not fork after the prompt, so it counts as one
    sequence.
    """
    resumed = engine()
    resumed.add_request(
        [1, 2, 3], SamplingParams(n=3, max_tokens=5), output_token_ids=[[], [4], []]
    )
    (request,) = resumed._requests.values()
    assert [(seq.width, seq.siblings) for seq in request.seqs] == [(1, [])] * 3
    drain(resumed)
    resumed.add_request([1, 2, 3], SamplingParams(n=3, max_tokens=5))
    (request,) = resumed._requests.values()
    assert request.seqs[0].width == 3
