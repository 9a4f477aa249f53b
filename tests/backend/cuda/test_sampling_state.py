"""The state of penalties on the device, with launches in flight."""

import gc
from typing import Any

import numpy as np
import pytest
import torch

from headrace import _native
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.backend.cuda.sampling_options import DeviceSamplers
from headrace.batch import DraftTree
from headrace.logit_ops import Expand, LaterExpands, SampleOp, SampleResult
from tests.backend.cuda.addresses import checked_addresses
from tests.backend.cuda.sampling_steps import Steps

VOCAB = 40
PENALTIES: dict[str, Any] = {
    "temperature": 0.7,
    "repetition_penalty": 1.4,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.5,
}
LOGITS = np.random.default_rng(7).normal(0, 1, (3, VOCAB)).astype(np.float32)


def sampler(seed: int = 0, **options: Any) -> Any:
    return _native.Sampler(VOCAB, [1, 2, 3], **{"seed": seed, **PENALTIES, **options})


def tokens_of(results: list[Any]) -> list[int]:
    return [token for result in results for token in result.tokens]


def test_options_of_a_native_sampler() -> None:
    given = {
        "vocab": VOCAB,
        "seq_index": 3,
        "seed": 2**64 - 1,
        "top_k": 4,
        "top_p": 0.5,
        "min_p": 0.25,
        **PENALTIES,
    }
    given |= {"logit_bias": [(3, 0.5)], "banned": [7, 9], "banned_until": 2**40}
    one = _native.Sampler(prompt=[5, 6, 5], **given)
    assert one.options == {
        name: pytest.approx(value) if isinstance(value, float) else value
        for name, value in given.items()
    }
    one.append(6)
    one.append(8)
    one.draw(np.where(np.arange(VOCAB) == 8, 90.0, 0.0).astype(np.float32), 0, -1)
    for each in (one, one.clone(1)):
        assert (
            each.has_penalties
            and each.num_appended == 3
            and each.seen().tolist() == [[5, 6, 8], [0, 1, 2]]
        )
    plain = _native.Sampler(VOCAB, [1])
    plain.append(2)
    assert not plain.has_penalties and plain.num_appended == 1 and plain.seen().shape == (2, 0)


def test_penalties_count_launches_in_flight() -> None:
    """Launches start before earlier ones are read, plain and with drafts; tokens equal
    the host's.
    """
    ours, theirs, steps = sampler(), sampler(), Steps(VOCAB)
    expected = [theirs.draw(LOGITS[0], position, -1)[0] for position in range(3)]
    launched = [steps.launch(LOGITS, [SampleOp(0, position, ours)]) for position in range(3)]
    assert ours.num_appended == 0 and not steps.sampler.must_wait([SampleOp(0, 3, ours)])
    assert tokens_of(steps.read(launched[0])) == expected[:1]
    expected += [theirs.draw(LOGITS[1], 3, -1)[0], theirs.draw(LOGITS[2], 4, -1)[0]]
    draft = DraftTree([expected[3]], [-1])
    launched.append(steps.launch(LOGITS, [SampleOp(1, 3, ours, draft)]))
    launched.append(steps.launch(LOGITS, [SampleOp(0, 5, ours)]))
    assert [token for each in launched[1:4] for token in tokens_of(steps.read(each))] == expected[
        1:
    ]
    assert tokens_of(steps.read(launched[4])) == [theirs.draw(LOGITS[0], 5, -1)[0]]
    np.testing.assert_array_equal(ours.seen(), theirs.seen())
    assert ours.num_appended == theirs.num_appended == 6


def test_tokens_appended_by_the_host_are_uploaded() -> None:
    ours, theirs, steps = sampler(), sampler(), Steps(VOCAB)
    for position in range(3):
        assert tokens_of(steps.run(LOGITS[:1], [SampleOp(0, position, ours)])) == [
            theirs.draw(LOGITS[0], position, -1)[0]
        ]
        for each in (ours, theirs):
            each.append(int(np.argmax(LOGITS[0])))
    in_flight = steps.launch(LOGITS, [SampleOp(0, 3, ours)])
    ours.append(5)
    next_draw = SampleOp(0, 4, ours)
    assert steps.sampler.must_wait([next_draw])
    with pytest.raises(RuntimeError):
        steps.sampler.begin([next_draw])
    steps.read(in_flight)
    assert not steps.sampler.must_wait([next_draw])
    theirs.draw(LOGITS[0], 3, -1)
    theirs.append(5)
    assert tokens_of(steps.run(LOGITS[:1], [next_draw])) == [theirs.draw(LOGITS[0], 4, -1)[0]]


def test_forked_samplers_have_separate_states() -> None:
    ours, theirs, steps = [sampler()], [sampler()], Steps(VOCAB)
    steps.run(LOGITS[:1], [SampleOp(0, 0, ours[0])])
    theirs[0].draw(LOGITS[0], 0, -1)
    for each in (ours, theirs):
        each.append(each[0].clone(1))
    for position in (1, 2, 3):  # both draw from one row
        drawn = steps.run(LOGITS[:1], [SampleOp(0, position, each) for each in ours])
        assert tokens_of(drawn) == [each.draw(LOGITS[0], position, -1)[0] for each in theirs]


def test_penalty_slots_are_freed_and_grow() -> None:
    steps = Steps(VOCAB)
    assert (
        steps.sampler.begin([SampleOp(0, 0, _native.Sampler(VOCAB, []))]).layout.slots == 0
    )  # without penalties there is no state
    for round in range(3):
        ours, theirs = ([sampler(seed) for seed in range(3)] for _ in range(2))
        for position in range(2):
            drawn = steps.run(LOGITS, [SampleOp(i, position, each) for i, each in enumerate(ours)])
            assert tokens_of(drawn) == [
                each.draw(LOGITS[i], position, -1)[0] for i, each in enumerate(theirs)
            ], round
        del drawn, ours
        gc.collect()
    kept = [(sampler(seed), sampler(seed)) for seed in range(6)]
    for position, (ours, theirs) in enumerate(
        [*kept, *kept]
    ):  # a state that grows keeps what is in it
        assert tokens_of(steps.run(LOGITS[:1], [SampleOp(0, position, ours)])) == [
            theirs.draw(LOGITS[0], position, -1)[0]
        ]
    assert steps.sampler.begin([]).layout.slots == 8


def test_logits_that_are_not_finite_change_no_state() -> None:
    ours, theirs, steps = sampler(), sampler(), Steps(VOCAB)
    bad = LOGITS[:1].copy()
    bad[0, 7] = np.nan
    assert steps.run(bad, [SampleOp(0, 0, ours)]) == [None]
    assert steps.sampler.last_tokens[0] == 0 and ours.num_appended == 0
    masks = np.array(
        [[0xFF7F, 0]], np.uint32
    )  # the draw never meets the NaN, but it has no log-probabilities
    assert isinstance(steps.run(bad, [SampleOp(0, 0, ours, masks=masks)])[0], SampleResult)
    assert isinstance(theirs.draw(bad[0], 0, -1, masks), tuple)
    assert steps.run(bad, [SampleOp(0, 1, ours, num_logprobs=0, masks=masks)]) == [None]
    assert tokens_of(steps.run(LOGITS[:1], [SampleOp(0, 1, ours)])) == [
        theirs.draw(LOGITS[0], 1, -1)[0]
    ]


def test_set_last_tokens() -> None:
    steps = Steps(VOCAB)
    steps.sampler.set_last_tokens([3, 5], [SampleResult([4, 6], [0], []), None])
    assert steps.sampler.last_tokens[:6].tolist() == [0, 0, 0, 6, 0, 0]
    with pytest.raises(ValueError):
        steps.sampler.begin([SampleOp(0, 0, _native.Sampler(VOCAB + 1, []))])


def test_unknown_sampler_options_raise() -> None:
    class Later:
        options = sampler().options | {"typical_p": 0.5}
        has_penalties = False

    samplers = DeviceSamplers(VOCAB, torch.device("cpu"))
    later: Any = Later()
    with pytest.raises(ValueError, match="sampler option 'typical_p' is not implemented"):
        samplers.record(later)


@pytest.mark.skipif(not is_interpreting(), reason="checks addresses in the interpreter")
@pytest.mark.parametrize(
    "options", [{}, {"logit_bias": [(3, 1.5)]}, {"top_p": 0.9}, {"top_k": 5, **PENALTIES}], ids=str
)
def test_chains_that_have_ended_read_no_memory(options: dict[str, Any]) -> None:
    """Two of three chains end after a depth. Their samples run on no row, with any option."""

    def chains() -> list[Expand]:
        samplers = [_native.Sampler(VOCAB, [1, 2], seed=seed, **options) for seed in range(3)]
        return [Expand(row, 5, each, 0, 1, False) for row, each in enumerate(samplers)]

    def drawn() -> list[Any]:
        steps, ops = Steps(VOCAB, spare=0), chains()
        first = steps.run_chains(LOGITS, ops)
        return [*first, *steps.run_chains(LOGITS[1:2], LaterExpands(ops, 1, 1))]

    with checked_addresses():
        found = drawn()
    steps, (op, *_) = Steps(VOCAB), chains()
    expected = [*steps.run(LOGITS[:1], [op]), *steps.run(LOGITS[1:2], [op._replace(position=6)])]
    assert [found[0], found[3]] == expected
