"""The engine's edges: refused requests, failures, ends, and timing."""

import gc
import weakref
from dataclasses import astuple, replace
from time import perf_counter
from typing import Any

import pytest

from headrace.batch import DraftTree
from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.errors import ClosedError, NonFiniteLogitsError, RequestError
from headrace.outputs import RequestOutput
from headrace.proposer import ProposerTraits
from headrace.request import RequestOptions
from headrace.sampling.sampler import token_logprobs
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers import METHODS, REQUIRED_OPTIONS, DraftModel, DraftModels
from tests.engine.toy import VOCAB, ToyExecutable, plain_decoding, toy_engine, toy_kv, toy_logits
from tests.tiny import drain, run_all

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def serves(engine: Engine) -> None:
    """Whether the engine still serves a request, and holds no block afterwards."""
    (result,) = run_all(engine, [([1, 2, 3], GREEDY)])
    assert [1, 2, 3, *result.outputs[0].token_ids] == plain_decoding([1, 2, 3], GREEDY, 0)
    stats = engine.stats()
    assert (stats.blocks_free, stats.running, stats.waiting) == (stats.blocks_total, 0, 0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "params", "message"),
        [
            ([], {}, "the prompt is empty"),
            (
                [1] * 40,
                {},
                "the prompt has 40 tokens, but max_model_len 40 allows 39",
            ),
            ([1] * 5000, {}, "the prompt has 5,000 tokens"),
            (
                [VOCAB],
                {},
                "prompt_token_ids has token 23, but the vocabulary ends at 22; the model has no",
            ),
            ([-1], {}, "prompt_token_ids must be a whole number from 0"),
            ([2**31], {}, "prompt_token_ids"),
            ([1.0], {}, "prompt_token_ids"),
            ([True], {}, "prompt_token_ids"),
            ("12", {}, "prompt_token_ids must be a list"),
            (7, {}, "prompt_token_ids must be a list"),
            ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids has token 23"),
            ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias has token 23"),
            (
                [1],
                {"logprobs": 0, "logprob_token_ids": [VOCAB]},
                "logprob_token_ids has token 23",
            ),
            (
                [1] * 30,
                {"max_tokens": 8},
                "the prompt of 30 tokens and 8 output tokens need up to 10 blocks of 4 tokens, "
                "but the cache has 9",
            ),
            ([1] * 39, {"max_tokens": None}, "and all possible output tokens need up to 10 blocks"),
        ],
    )
    def test_a_refused_request_names_its_fault(
        self, prompt: Any, params: dict[str, Any], message: str
    ) -> None:
        engine = toy_engine(num_blocks=9, block_size=4)
        with pytest.raises(RequestError, match=message):
            engine.add_request(prompt, SamplingParams(**params))
        assert not engine.has_work
        serves(engine)

    def test_values_that_are_no_params(self) -> None:
        with pytest.raises(RequestError, match="params must be SamplingParams, not dict"):
            toy_engine().add_request([1], {"temperature": 0})  # type: ignore[arg-type]

    def test_a_request_id_in_use(self) -> None:
        engine = toy_engine()
        engine.add_request([1], GREEDY, request_id="a")
        with pytest.raises(RequestError, match="'a' is in use"):
            engine.add_request([1], GREEDY, request_id="a")
        drain(engine)
        engine.add_request([1], GREEDY, request_id="a")
        assert [update.request_id for update in drain(engine)] == ["a"] * 6

    def test_the_largest_that_fits(self) -> None:
        engine = toy_engine(num_blocks=9, block_size=4)
        (result,) = run_all(engine, [([1] * 30, SamplingParams(max_tokens=7, seed=0))])
        assert len(result.outputs[0].token_ids) == 7

    def test_the_base_seed_of_requests_without_one(self) -> None:
        """The default is 0; None is another seed for each engine."""
        params = SamplingParams(max_tokens=20)
        drawn = [
            run_all(toy_engine(**seed), [([1], params)])[0].outputs[0].token_ids
            for seed in ({}, {"seed": 0}, {"seed": 1}, {"seed": None}, {"seed": None})
        ]
        assert drawn[0] == drawn[1] and len(set(map(tuple, drawn))) == 4


class TestEnds:
    def test_the_context_cuts_max_tokens(self) -> None:
        for max_tokens in (100, None):
            (result,) = run_all(
                toy_engine(), [([1] * 35, SamplingParams(max_tokens=max_tokens, seed=1))]
            )
            (output,) = result.outputs
            assert (len(output.token_ids), output.finish_reason) == (5, "length")

    def test_min_tokens_holds_off_end_tokens(self) -> None:
        free = plain_decoding([4], SamplingParams(temperature=0, max_tokens=12), 0)[1:]
        stop = free[2]
        params = {"temperature": 0.0, "max_tokens": 12, "stop_token_ids": [stop]}
        (result,) = run_all(toy_engine(), [([4], SamplingParams(**params))])
        assert (result.outputs[0].token_ids, result.outputs[0].stop_reason) == (free[:3], stop)
        (result,) = run_all(toy_engine(), [([4], SamplingParams(**params, min_tokens=5))])
        assert stop not in result.outputs[0].token_ids[:5]
        assert len(result.outputs[0].token_ids) > 5

    def test_tokens_accepted_after_a_stop_are_dropped(self) -> None:
        class Oracle:
            traits = ProposerTraits(8)

            def propose(self, seqs: list[Any], budgets: list[int]) -> list[Any]:
                rest = [
                    free[len(b.known) : len(b.known) + r]
                    for b, r in zip(seqs, budgets, strict=True)
                ]
                return [DraftTree(r, list(range(-1, len(r) - 1))) for r in rest]

            def observe(self, *_: Any) -> None: ...

        free = plain_decoding([4], SamplingParams(temperature=0, max_tokens=30), 0)
        stop = free[4]
        engine = toy_engine(proposer=Oracle())
        params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop], logprobs=0)
        (result,) = run_all(engine, [([4], params)])
        (output,) = result.outputs
        assert output.token_ids == free[1 : free.index(stop, 1) + 1]
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
        assert engine.stats().steps < len(output.token_ids)
        serves(engine)


def test_options_that_are_not_given() -> None:
    """Requests without options have priority 0 and run in order of arrival; a result has the text
    of its prompt.
    """
    engine = toy_engine(max_num_seqs=1)
    ids = [
        engine.add_request([1], GREEDY),
        engine.add(engine.check([2], GREEDY)),
        engine.add_request([3], GREEDY, options=RequestOptions(priority=0), prompt="three"),
    ]
    results = [update.result for update in drain(engine) if update.result]
    assert [(result.request_id, result.prompt) for result in results] == list(
        zip(ids, (None, None, "three"), strict=True)
    )


class TestAbort:
    def test_abort_in_every_state(self) -> None:
        engine = toy_engine(num_blocks=7, block_size=4, max_num_batched_tokens=9)
        params = SamplingParams(n=2, seed=3, max_tokens=12)
        for steps in range(14):
            ids = [engine.add_request([i, 2, 3, 4, 5, 6, 7], params) for i in range(3)]
            for _ in range(steps):
                engine.step()
            for request_id in reversed(ids):
                result = engine.abort(request_id)
                assert result is None or {o.finish_reason for o in result.outputs} <= {
                    "abort",
                    "length",
                }
                assert engine.abort(request_id) is None
            assert not engine.has_work
            serves(engine)

    def test_abort_of_an_unknown_id(self) -> None:
        assert toy_engine().abort("nobody") is None

    def test_abort_returns_the_output_so_far(self) -> None:
        engine = toy_engine()
        request_id = engine.add_request([1, 2, 3], GREEDY)
        for _ in range(3):
            engine.step()
        result = engine.abort(request_id)
        assert isinstance(result, RequestOutput) and result.finished
        assert result.outputs[0].token_ids == plain_decoding([1, 2, 3], GREEDY, 0)[3:6]


def test_finish_ends_a_request_as_a_stop_string_does() -> None:
    """The updates before the end and the last ones have each token once."""
    for steps in range(14):
        engine = toy_engine(num_blocks=7, block_size=4, max_num_batched_tokens=9)
        params = SamplingParams(n=2, seed=3, max_tokens=12)
        ids = [engine.add_request([i, 2, 3, 4, 5, 6, 7], params) for i in range(3)]
        updates = [update for _ in range(steps) for update in engine.step()]
        updates += engine.finish(ids[1])
        assert engine.finish(ids[1]) == []
        mine = [update for update in updates if update.request_id == ids[1]]
        result = mine[-1].result
        assert result is not None and sum(update.result is not None for update in mine) == 1
        for index, output in enumerate(result.outputs):
            tokens = [t for update in mine if update.index == index for t in update.token_ids]
            assert tokens == output.token_ids and output.finish_reason in ("stop", "length")
        engine.abort(ids[0])
        engine.abort(ids[2])
        assert not engine.has_work
        serves(engine)


def test_updates_name_their_request() -> None:
    engine = toy_engine()
    ids = [
        engine.add_request([token, 2], SamplingParams(n=2, seed=token, max_tokens=9))
        for token in (1, 5)
    ]
    updates = drain(engine)
    for request_id in ids:
        (result,) = [
            update.result for update in updates if update.result and update.request_id == request_id
        ]
        for output in result.outputs:
            own = [
                update
                for update in updates
                if (update.request_id, update.index) == (request_id, output.index)
            ]
            assert [token for update in own for token in update.token_ids] == output.token_ids
            assert "".join(update.text for update in own) == output.text
            assert [update.finish_reason for update in own if update.finish_reason] == [
                output.finish_reason
            ]


@pytest.mark.parametrize("late", [False, True])
def test_prompt_logprobs_belong_to_the_tokens_of_the_prompt(late: bool) -> None:
    engine = toy_engine(max_logit_rows=9, late=late)
    prompts = {
        0: [3, 1, 4, 1, 5, 9, 2, 6],
        2: [2, 7, 1, 8],
    }  # by the number of top log-probabilities
    requests = [
        ([7, 7], GREEDY),
        *(
            (prompt, SamplingParams(temperature=0, prompt_logprobs=n, max_tokens=4))
            for n, prompt in prompts.items()
        ),
    ]
    plain, *results = run_all(engine, requests)
    assert plain.prompt_logprobs is None and [7, 7, *plain.outputs[0].token_ids] == plain_decoding(
        [7, 7], GREEDY, 0
    )
    for (num, prompt), result in zip(prompts.items(), results, strict=True):
        first, *others = result.prompt_logprobs or []
        assert first is None and len(others) == len(prompt) - 1
        for i, described in enumerate(others, 1):
            expected = token_logprobs(toy_logits(prompt[:i]), prompt[i], num)
            assert next(iter(described)) == prompt[i] and set(described) == {
                prompt[i],
                *expected.top_ids,
            }
            assert described[prompt[i]][:2] == (expected.logprob, expected.rank)
        assert [*prompt, *result.outputs[0].token_ids] == plain_decoding(
            prompt, replace(GREEDY, max_tokens=4), 0
        )


@pytest.mark.parametrize("late", [False, True])
def test_logprobs_of_named_tokens(late: bool) -> None:
    named = [5, VOCAB - 1, 0, 11]
    engine = toy_engine(late=late)
    options = {"max_tokens": 6, "logprobs": 2, "n": 2, "temperature": 0.9, "seed": 4}
    plain, scored = run_all(
        engine,
        [
            ([3, 1, 4], SamplingParams(**options)),
            ([3, 1, 4], SamplingParams(**options, logprob_token_ids=named)),
        ],
    )
    for reference, output in zip(plain.outputs, scored.outputs, strict=True):
        assert output.token_ids == reference.token_ids
        for i, described in enumerate(output.logprobs or []):
            known = [3, 1, 4, *output.token_ids[:i]]
            assert list(described) == list(dict.fromkeys([output.token_ids[i], *named]))
            for token, score in described.items():
                expected = token_logprobs(toy_logits(known), token, 0)
                assert score[:2] == (expected.logprob, expected.rank)


class TestFailures:
    def test_a_request_fails_alone(self) -> None:
        engine = toy_engine(broken=5)
        good, bad = ([1, 2, 3], GREEDY), ([1, 5], SamplingParams(n=3, max_tokens=4, seed=1))
        results = run_all(engine, [good, bad, good])
        for result in (results[0], results[2]):
            assert [1, 2, 3, *result.outputs[0].token_ids] == plain_decoding([1, 2, 3], GREEDY, 0)
        assert isinstance(results[1].error, NonFiniteLogitsError)
        assert [(o.finish_reason, o.stop_reason) for o in results[1].outputs] == [
            ("error", str(results[1].error))
        ] * 3
        serves(engine)

    def test_logits_that_become_non_finite(self) -> None:
        drawn = plain_decoding([4], SamplingParams(temperature=0, max_tokens=12), 0)[1:]
        broken = next(token for token in drawn[3:] if token not in (1, 2, 3, 4, *drawn[:3]))
        engine = toy_engine(broken=broken)
        (result,) = run_all(engine, [([4], SamplingParams(temperature=0, max_tokens=12))])
        (output,) = result.outputs
        assert (output.token_ids, output.finish_reason) == (
            drawn[: drawn.index(broken) + 1],
            "error",
        )
        assert "non-finite logits" in str(output.stop_reason)

    def test_non_finite_prompt_logprobs(self) -> None:
        engine = toy_engine(broken=5, max_logit_rows=1)
        (result,) = run_all(engine, [([1, 2, 5, 3], SamplingParams(prompt_logprobs=0))])
        assert isinstance(result.error, NonFiniteLogitsError) and "non-finite logits" in str(
            result.error
        )
        assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == (
            "error",
            str(result.error),
        )
        serves(engine)

    @pytest.mark.parametrize("where", ["propose", "observe"])
    def test_a_proposer_that_raises(self, where: str) -> None:
        class Broken:
            traits = ProposerTraits(4)

            def __getattr__(self, name: str) -> Any:
                if name == where:
                    raise RuntimeError
                if name in ("propose", "observe"):
                    return lambda *_: []
                raise AttributeError

        engine = toy_engine(proposer=Broken())
        serves(engine)
        assert engine.stats().proposer_failures > 0


def test_n_samples_equal_separate_requests() -> None:
    params = SamplingParams(n=5, seed=7, max_tokens=8)
    (result,) = run_all(toy_engine(), [([1, 2, 3], params)])
    assert [output.index for output in result.outputs] == list(range(5))
    for output in result.outputs:
        assert [1, 2, 3, *output.token_ids] == plain_decoding([1, 2, 3], params, output.index)
    assert len({tuple(output.token_ids) for output in result.outputs}) == 5


def test_seeds_are_derived_for_requests_without_one() -> None:
    params = SamplingParams(max_tokens=8)
    requests = [([1, 2, 3], params)] * 3

    def tokens(seed: int) -> list[list[int]]:
        return [result.outputs[0].token_ids for result in run_all(toy_engine(seed=seed), requests)]

    assert tokens(0) == tokens(0) != tokens(1)
    assert len({tuple(t) for t in tokens(0)}) == 3


def test_timing_sums_to_wall_time() -> None:
    engine = toy_engine(max_num_seqs=1)
    start = perf_counter()
    first, second = run_all(engine, [([1, 2, 3], GREEDY), ([4], GREEDY)])
    wall = perf_counter() - start
    for result in (first, second):
        timing = result.timing
        assert min(astuple(timing)) > 0
        assert sum(astuple(timing)) <= wall
    assert sum(astuple(second.timing)) == pytest.approx(wall, rel=0.1, abs=1e-3)
    assert second.timing.queue > first.timing.prefill + first.timing.decode


@pytest.mark.parametrize("control", [True, False])
@pytest.mark.parametrize(
    "method", [*(name for name in METHODS if name not in REQUIRED_OPTIONS), "draft_model"]
)
def test_an_ended_request_is_forgotten(method: str, control: bool) -> None:
    """A proposer's data about a sequence is freed with the sequence."""
    draft = DraftModel(ToyExecutable(4), toy_kv(64, 4), 40)
    engine = toy_engine(
        proposer=METHODS[method](EngineConfig(draft_depth=1), DraftModels(draft)),
        adaptive_speculation=control,
    )
    gc.disable()
    try:
        engine.add_request([1, 2] * 4, SamplingParams(n=3, seed=1))
        aborted = engine.add_request([1, 2] * 4, SamplingParams(max_tokens=30, ignore_eos=True))
        for _ in range(8):
            engine.step()
        seqs = [weakref.ref(seq) for request in engine._requests.values() for seq in request.seqs]
        engine.abort(aborted)
        drain(engine)
        assert len(seqs) == 4 and not engine._requests
        assert [ref() for ref in seqs] == [None] * 4
        assert draft.kv.pools[0].num_free == draft.kv.pools[0].num_blocks
    finally:
        gc.enable()


def test_an_end_token_that_the_model_does_not_have() -> None:
    engine = toy_engine()
    engine._tokenizer.eos_ids = frozenset({VOCAB, 10**6})  # type: ignore[misc]
    serves(engine)


def test_close_the_engine() -> None:
    engine = toy_engine()
    engine.add_request([1], GREEDY)
    engine.close()
    engine.close()
    executable = engine._loop.executable
    assert isinstance(executable, ToyExecutable) and executable.closed
    assert engine.stats().blocks_free == engine.stats().blocks_total
    for use in (lambda: engine.add_request([1], GREEDY), engine.step):
        with pytest.raises(ClosedError):
            use()
    assert engine.abort("0") is None
