"""Sampling on the device against the NumPy twin and the native sampler: the same tokens.

Scores in float64 decide on both sides. The twin allows one exception: a nucleus may end
one token earlier or later if its share is within 10^-6 of `top_p`, since weights are
float32.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.backend.cuda.sampling import runs_on_device
from headrace.batch import NO_DRAFT, DraftTree
from headrace.constraint import mask_of
from headrace.logit_ops import Expand, Expanded, RankBeams, SampleOp, SampleResult, Score
from headrace.sampling.host import run_logit_ops
from tests.backend.cuda.examples import examples
from tests.backend.cuda.sampling_steps import Steps
from tests.sampling import sampler_twin as twin

OPTIONS = {
    "temperature": st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 0.7, 1.0, 1.7, 50.0]),
    "top_k": st.sampled_from([0, 0, 1, 2, 5, 40, 100_000]),
    "top_p": st.sampled_from([1.0, 1.0, 1e-9, 0.25, 0.5, 0.9, 0.999, 1 - 1e-12]),
    "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -0.5]),
    "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4, -0.4]),
    "seed": st.integers(0, 2**64 - 1),
    "seq_index": st.sampled_from([0, 1, 7, 2**32 - 1]),
}


@st.composite
def sampler_options(draw: st.DrawFn, vocab: int) -> dict[str, Any]:
    """Options of a sampler, and its prompt."""
    token = st.integers(0, vocab - 1)
    options = draw(st.fixed_dictionaries(OPTIONS))
    biases = draw(st.dictionaries(token, st.sampled_from([-100.0, -1.0, 0.5, 30.0]), max_size=3))
    banned = draw(st.lists(token, max_size=2 if vocab > 9 else 0))
    prompt = draw(st.lists(token, max_size=5))
    return options | {
        "logit_bias": list(biases.items()),
        "banned": banned,
        "banned_until": 11,
        "prompt": prompt,
    }


def logits_of(seed: int, rows: int, vocab: int) -> np.ndarray:
    """Rows of logits: flat and peaked, with ties, zeros of both signs and -inf."""
    rng = np.random.default_rng(seed)
    scales = rng.choice([0.0, 0.3, 2.0, 10.0, 60.0], (rows, 1))
    logits = rng.normal(0, 1, (rows, vocab)) * scales
    logits = np.where(rng.integers(0, 2, (rows, 1)) == 1, np.round(logits), logits)
    forbidden = rng.random((rows, vocab)) < rng.choice([0.0, 0.0, 0.4], (rows, 1))
    return np.where(forbidden & (vocab > 9), -np.inf, logits).astype(np.float32)


@settings(max_examples=examples(10), deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 5, 31, 33, 64, 97, 200]),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_sampled_tokens_equal_the_numpy_twin(vocab: int, seed: int, data: st.DataObject) -> None:
    samplers = data.draw(st.lists(sampler_options(vocab), min_size=1, max_size=4))
    natives = [_native.Sampler(vocab, **options) for options in samplers]
    twins = [twin.SamplerTwin(vocab, **options) for options in samplers]
    steps = Steps(vocab)
    for position in (9, 10, 11, 12):
        logits = logits_of(seed + position, len(samplers), vocab)
        drawn = steps.run(
            logits, [SampleOp(row, position, sampler) for row, sampler in enumerate(natives)]
        )
        for row, (result, reference) in enumerate(zip(drawn, twins, strict=True)):
            allowed = (
                reference.draws(logits[row], position)
                if np.isfinite(reference.adjusted(logits[row], position).max())
                else {None}
            )
            assert (result.tokens[0] if result else None) in allowed
            if result:
                reference.output += result.tokens
                assert steps.sampler.last_tokens[row] == result.tokens[0]


@pytest.mark.parametrize(
    ("row", "temperature", "top_p"),
    [
        ([-3, -4, -15, -1, -1, -23, -1, -13, 6, -9, -17, 12, 12, 7, 3], 0.3, 0.5),
        ([0, 0], 1.0, 0.5),
        ([0, 0, -20], 1.0, 0.5),
        ([0, 0, 0, 0, -30], 1.0, 0.75),
        ([*[-30] * 70, 0, *[-25] * 70, 0, *[-30] * 70], 1.0, 0.5),
    ],
)
@pytest.mark.parametrize("min_p", [0.0, 1e-20])
def test_a_nucleus_that_ends_at_equal_logits(
    row: list[float], temperature: float, top_p: float, min_p: float
) -> None:
    logits = np.array([row] * 4, np.float32)
    options: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    steps, natives, on_host = (
        Steps(len(row)),
        *([_native.Sampler(len(row), [], seed=i, **options) for i in range(4)] for _ in range(2)),
    )
    for position in range(2):
        ops = [
            [SampleOp(i, position, sampler) for i, sampler in enumerate(samplers)]
            for samplers in (natives, on_host)
        ]
        assert steps.run(logits, ops[0]) == run_logit_ops(ops[1], logits)


@st.composite
def trees(draw: st.DrawFn, vocab: int) -> DraftTree:
    size = draw(st.integers(0, 5))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    return DraftTree([draw(st.integers(0, vocab - 1)) for _ in range(size)], parents)


@settings(max_examples=examples(6), deadline=None)
@given(vocab=st.sampled_from([2, 3, 40]), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_draft_trees_give_the_tokens_of_the_host(
    vocab: int, seed: int, data: st.DataObject
) -> None:
    """With masks, penalties, log-probabilities, and rows that are not finite, which count
    only on the accepted path.
    """
    options = data.draw(st.lists(sampler_options(vocab), min_size=1, max_size=3))
    natives, on_host = ([_native.Sampler(vocab, **one) for one in options] for _ in range(2))
    rng = np.random.default_rng(seed)
    steps = Steps(vocab)
    for position in (8, 12):
        drafts = [data.draw(trees(vocab)) for _ in options]
        first = np.cumsum([0] + [1 + len(draft.tokens) for draft in drafts])
        logits = logits_of(seed, int(first[-1]), vocab)
        if data.draw(st.booleans()):
            logits[rng.integers(len(logits)), rng.integers(vocab)] = rng.choice([np.nan, np.inf])
        masks = [
            None if rng.integers(2) else _masks(rng, 1 + len(draft.tokens), vocab)
            for draft in drafts
        ]
        counts = [data.draw(st.sampled_from([-1, 0, 2])) for _ in drafts]
        rows = list(zip(first.tolist(), drafts, counts, masks, strict=False))
        draws, expected = (
            [
                SampleOp(row, position, s, draft, n, masks=m)
                for s, (row, draft, n, m) in zip(samplers, rows, strict=True)
            ]
            for samplers in (natives, on_host)
        )
        for got, wanted in zip(
            steps.run(logits, draws), run_logit_ops(expected, logits), strict=True
        ):
            assert_same(got, wanted)
        for ours, theirs in zip(natives, on_host, strict=True):
            if (
                ours.num_appended != theirs.num_appended
            ):  # the host appends the tokens before a row that is not finite
                return


def _masks(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    return np.stack(
        [mask_of(rng.permutation(vocab)[: rng.integers(1, vocab + 1)], vocab) for _ in range(rows)]
    )


def assert_same(got: Any, wanted: Any) -> None:
    """Tokens and ranks are equal, log-probabilities up to rounding."""
    assert (got is None) == (wanted is None)
    if isinstance(got, SampleResult):
        assert got[:2] == wanted[:2]
        for ours, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
            assert (ours.rank, ours.top_ids) == (theirs.rank, theirs.top_ids)
            np.testing.assert_allclose(
                [ours.logprob, *ours.top_logprobs],
                [theirs.logprob, *theirs.top_logprobs],
                atol=2e-6,
                rtol=1e-6,
            )


def test_a_tree_gives_the_tokens_of_plain_decoding() -> None:
    """Drafts that contain the true tokens are accepted completely, and penalties count
    the path.
    """
    vocab, options = (
        50,
        {
            "seed": 3,
            "temperature": 1.5,
            "presence_penalty": 2.0,
            "frequency_penalty": 1.0,
            "repetition_penalty": 1.2,
        },
    )
    logits = np.random.default_rng(0).normal(0, 1, (4, vocab)).astype(np.float32)
    plain = _native.Sampler(vocab, [4], **options)
    tokens = [plain.draw(logits[i], 1 + i, -1)[0] for i in range(4)]
    sampler, steps = _native.Sampler(vocab, [4], **options), Steps(vocab)
    others = [(token + 1) % vocab for token in tokens]
    draft = DraftTree([others[0], tokens[0], tokens[1], others[1], tokens[2]], [-1, -1, 1, 1, 2])
    rows = logits[[0, 1, 1, 2, 3, 3]]  # the row behind each node has the logits of its depth
    assert steps.run(rows, [SampleOp(0, 1, sampler, draft)]) == [
        SampleResult(tokens, [1, 2, 4], [])
    ]
    assert steps.sampler.last_tokens[0] == tokens[-1]
    assert steps.run(logits[:1], [SampleOp(0, 5, sampler)])[0].tokens == [
        plain.draw(logits[0], 5, -1)[0]
    ]


def test_all_kinds_of_logit_ops_in_one_launch() -> None:
    vocab = 70
    logits = np.random.default_rng(1).normal(0, 2, (5, vocab)).astype(np.float32)
    logits[3, 5] = np.nan

    def ops() -> list[Any]:
        samplers = [_native.Sampler(vocab, [], seed=i, min_p=0.1 * (i % 2)) for i in range(4)]
        return [
            Score(2, 9, 3),
            Expand(4, 4, samplers[0], 0, 1, False),
            SampleOp(1, 4, samplers[1], num_logprobs=1),
            Score(3, 9, 3),
            SampleOp(0, 4, samplers[2], NO_DRAFT, -1, "typical"),
            SampleOp(3, 4, samplers[3]),
        ]

    got, wanted = Steps(vocab).run(logits, ops()), run_logit_ops(ops(), logits)
    # The device returns no scores.
    assert isinstance(got[1], Expanded) and got[1][:2] == wanted[1][:2]
    assert got[4] == wanted[4] and got[3] is got[5] is None
    assert got[0][1:3] == wanted[0][1:3]
    assert_same(got[2], wanted[2])


def test_runs_on_device() -> None:
    sampler = _native.Sampler(5, [])
    draft = DraftTree([1], [-1])
    assert runs_on_device(SampleOp(0, 0, sampler, draft)) and runs_on_device(
        SampleOp(0, 0, sampler, NO_DRAFT, -1, "typical")
    )
    assert not runs_on_device(SampleOp(0, 0, sampler, draft, -1, "typical")) and not runs_on_device(
        SampleOp(0, 0, sampler, method="rejection")
    )
    assert runs_on_device(Expand(0, 0, sampler, 0, 1, False)) and runs_on_device(Score(0, 1, 2))
    assert not runs_on_device(Expand(0, 0, sampler, 0, 2, False)) and not runs_on_device(
        Expand(0, 0, sampler, 0, 1, True)
    )
    beams = RankBeams(
        rows=[0],
        position=0,
        samplers=[sampler],
        totals=[0.0],
        num_candidates=3,
        all_count=False,
        end_ids=[],
    )
    assert not runs_on_device(beams)


@settings(max_examples=examples(4), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_sampling_does_not_depend_on_the_batch(seed: int, data: st.DataObject) -> None:
    """Equal to the bit, including log-probabilities."""
    vocab, size = 100, 3
    options = [data.draw(sampler_options(vocab)) for _ in range(size)]
    logits = logits_of(seed, size, vocab)

    def draws(rows: list[int]) -> list[SampleOp]:
        return [
            SampleOp(i, 10, _native.Sampler(vocab, **options[row]), num_logprobs=3)
            for i, row in enumerate(rows)
        ]

    crowd = Steps(vocab).run(logits, draws([0, 1, 2]))
    turned = Steps(vocab, spare=3).run(logits[[2, 0, 1]], draws([2, 0, 1]))
    assert [turned[i] for i in (1, 2, 0)] == crowd
    assert Steps(vocab, spare=0).run(logits[1:2], draws([1])) == crowd[1:2]
