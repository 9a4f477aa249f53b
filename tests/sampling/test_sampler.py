"""The native sampler against its NumPy twin, published test vectors of its random generator, and
the distribution that it must sample from.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.batch import NO_DRAFT, DraftTree
from headrace.errors import NonFiniteLogitsError
from headrace.logit_ops import SampleOp
from tests.sampling import sampler_twin as twin

VECTORS = [  # from the kat_vectors file of Random123, the authors' own code
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


ISAS = _native.isas()


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert [_native.philox(counter, key, isa) for isa in ISAS] == [list(words)] * len(ISAS)
    assert twin.philox(counter, key) == list(words)


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Rows of logits: wide and narrow, flat and peaked, with ties and with -inf."""
    vocab = draw(st.sampled_from([1, 2, 3, 15, 16, 31, 32, 33, 64, 127, 256, 257, 500, 3000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row = rng.normal(0, draw(st.sampled_from([0.0, 0.3, 2.0, 10.0, 60.0])), vocab)
    if draw(st.booleans()):
        row = np.round(row)
    if draw(st.booleans()) and vocab > 2:
        row[rng.permutation(vocab)[: vocab // 2]] = -np.inf
    return row.astype(np.float32)


FILTERS = {
    "temperature": st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 0.7, 1.0, 1.7, 50.0]),
    "top_k": st.sampled_from([0, 0, 1, 2, 5, 40, 100_000]),
    "top_p": st.sampled_from([1.0, 1.0, 1e-9, 0.25, 0.5, 0.9, 0.999, 1 - 1e-12]),
    "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -0.5]),
    "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4, -0.4]),
    "seed": st.integers(0, 2**64 - 1),
    "seq_index": st.sampled_from([0, 1, 7]),
}


@settings(max_examples=300, deadline=None)
@given(row=rows(), options=st.fixed_dictionaries(FILTERS), data=st.data())
def test_native_samples_match_the_twin(
    row: np.ndarray, options: dict[str, Any], data: st.DataObject
) -> None:
    vocab = len(row)
    token = st.integers(0, vocab - 1)
    biases = data.draw(
        st.dictionaries(token, st.sampled_from([-100.0, -1.0, 0.5, 30.0]), max_size=3)
    )
    options |= {"logit_bias": list(biases.items())}
    if np.isfinite(row).sum() > 2:
        options |= {"banned": [int(np.argmax(row))], "banned_until": 12}
    prompt = data.draw(st.lists(token, max_size=5))
    native = _native.Sampler(vocab, prompt, isa=data.draw(st.sampled_from(ISAS)), **options)
    reference = twin.SamplerTwin(vocab, prompt, **options)
    for position in (10, 11, 12, 13):
        token, logprobs = native.draw(row, position, -1)
        assert token in reference.draws(row, position) and logprobs is None
        reference.output.append(token)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("row", "temperature", "top_p"),
    [
        ([-3, -4, -15, -1, -1, -23, -1, -13, 6, -9, -17, 12, 12, 7, 3], 0.3, 0.5),
        ([0, 0], 1.0, 0.5),
        ([0, 0, -20], 1.0, 0.5),
        ([0, 0, 0, 0, -30], 1.0, 0.75),
        ([*[0] * 300, *[-17] * 9], 1.0, 0.5),
        ([*[-30] * 700, 0, *[-25] * 700, 0, *[-30] * 700], 1.0, 0.5),
    ],
)
def test_a_nucleus_that_ends_at_equal_logits(
    row: list[float], temperature: float, top_p: float, isa: str
) -> None:
    """A probability of 10^-13 besides two equal tokens decides whether the first alone has half."""
    logits = np.array(row, np.float32)
    options = {"temperature": temperature, "top_p": top_p}
    kept = twin.SamplerTwin(len(row), [], **options).filtered(logits, top_p)
    assert (
        np.flatnonzero(
            _native.Sampler(len(row), [], isa=isa, **options).probabilities(logits, 0)
        ).tolist()
        == kept.tolist()
    )


@settings(max_examples=200, deadline=None)
@given(
    row=rows(),
    isa=st.sampled_from(ISAS),
    top_p=st.sampled_from([0.1, 0.25, 0.5, 0.9]),
    temperature=st.sampled_from([0.3, 1.0, 50.0]),
)
def test_a_nucleus_is_the_smallest_of_best_tokens(
    row: np.ndarray, isa: str, top_p: float, temperature: float
) -> None:
    sampler = _native.Sampler(len(row), [], isa=isa, top_p=top_p, temperature=temperature)
    kept, best = np.flatnonzero(sampler.probabilities(row, 0)), twin.order(row)
    assert set(kept) == set(best[: len(kept)])
    shares = np.cumsum(np.exp(twin.logprobs(row / np.float32(temperature)))[best])
    assert shares[len(kept) - 1] > top_p - 1e-6
    assert len(kept) == 1 or shares[len(kept) - 2] < top_p + 1e-6


@settings(max_examples=100, deadline=None)
@given(row=rows(), num_logprobs=st.integers(0, 20), isa=st.sampled_from(ISAS), data=st.data())
def test_logprobs_match_the_twin(
    row: np.ndarray, num_logprobs: int, isa: str, data: st.DataObject
) -> None:
    token = data.draw(st.integers(0, len(row) - 1))
    logprob, rank, top_ids, top_logprobs = _native.token_logprobs(row, token, num_logprobs, isa)
    expected, best = twin.logprobs(row), twin.order(row)
    np.testing.assert_allclose(
        [logprob, *top_logprobs], [expected[token], *expected[top_ids]], atol=1e-5, rtol=1e-6
    )
    assert rank == 1 + list(best).index(token)
    assert top_ids == list(best[:num_logprobs])


def test_a_draw_gives_logprobs_of_the_raw_distribution() -> None:
    row = np.array([0.0, 2.0, 1.0], np.float32)
    sampler = _native.Sampler(3, [], temperature=0.0, logit_bias=[(0, 9.0)])
    assert sampler.draw(row, 0, 2) == (0, _native.token_logprobs(row, 0, 2))


def test_a_clone_keeps_the_tokens_and_has_its_own_noise() -> None:
    row = np.zeros(1000, np.float32)
    options = {"seed": 5, "presence_penalty": 2.0}
    first = _native.Sampler(1000, [], seq_index=0, **options)
    first.draw(row, 0, -1)
    clone = first.clone(3)
    reference = twin.SamplerTwin(1000, [], seq_index=0, **options)
    reference.draw(row, 0)
    reference.seq_index = 3
    assert clone.draw(row, 1, -1)[0] == reference.draw(row, 1) != first.draw(row, 1, -1)[0]


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.5}]
)
def test_draws_from_the_softmax(filters: dict[str, Any]) -> None:
    """Chi-square over 40,000 positions, with a fixed seed.

    A correct sampler exceeds the limit by chance once in 10^6 seeds.
    """
    row = np.array([1.0, 0.0, 2.0, -1.0, 0.5, 1.5, -3.0], np.float32)
    reference = twin.SamplerTwin(len(row), [], **filters)
    kept = reference.filtered(row, reference.top_p)
    weights = np.exp(row[kept].astype(np.float64) / reference.temperature)
    sampler = _native.Sampler(len(row), [], seed=1, **filters)
    draws = 40_000
    counts = np.bincount(
        [sampler.draw(row, position, -1)[0] for position in range(draws)], minlength=len(row)
    )
    expected = draws * weights / weights.sum()
    assert counts.sum() == counts[kept].sum()
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    degrees = len(kept) - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees) + 15


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_raise(bad: float, temperature: float) -> None:
    sampler = _native.Sampler(50, [], temperature=temperature)
    row = np.zeros(50, np.float32)
    row[37] = bad
    with pytest.raises(NonFiniteLogitsError, match="non-finite"):
        sampler.draw(row, 0, -1)
    with pytest.raises(NonFiniteLogitsError):
        _native.token_logprobs(row, 0, 1)
    with pytest.raises(NonFiniteLogitsError):
        sampler.draw(np.full(50, -np.inf, np.float32), 0, -1)
    assert sampler.draw(np.eye(50, dtype=np.float32)[7] * 100, 0, -1) == (7, None)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": float("nan")},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"logit_bias": [(8, 1.0)]},
        {"logit_bias": [(-1, 1.0)]},
        {"logit_bias": [(0, float("nan"))]},
        {"banned": [8]},
    ],
)
def test_arguments_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        _native.Sampler(8, [], **options)


def test_token_ids_and_widths_are_checked() -> None:
    for prompt in ([8], [-1]):
        with pytest.raises(ValueError, match="vocabulary"):
            _native.Sampler(8, prompt)
    with pytest.raises(ValueError, match="vocabulary"):
        _native.token_logprobs(np.zeros(8, np.float32), 8, 0)
    with pytest.raises(ValueError, match="as wide"):
        _native.Sampler(8, []).draw(np.zeros(9, np.float32), 0, -1)


def test_a_batch_of_draws_is_as_draws_one_by_one() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (7, 500)).astype(np.float32)
    logits[4, 17] = np.nan
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 7, "presence_penalty": 1.0},
        {"min_p": 0.1},
    ]
    one_by_one, at_once = (
        [_native.Sampler(500, [], seed=i, **options[i % 4]) for i in range(12)] for _ in range(2)
    )
    pool = _native.Pool(2)
    for position in range(5):
        rows = rng.integers(0, 7, 12).tolist()
        wanted = rng.integers(-1, 4, 12).tolist()
        draws = [
            SampleOp(row, position, sampler, NO_DRAFT, num)
            for sampler, row, num in zip(at_once, rows, wanted, strict=True)
        ]
        for sampler, row, num, drawn in zip(
            one_by_one, rows, wanted, _native.verify_exact(pool, logits, draws), strict=True
        ):
            if row == 4:
                assert drawn is None
            else:
                token, logprobs = sampler.draw(logits[row], position, num)
                assert drawn == ([token], [], [] if logprobs is None else [logprobs])


def test_arguments_of_a_batch_of_draws_are_checked() -> None:
    pool, logits, sampler = _native.Pool(1), np.zeros((2, 8), np.float32), _native.Sampler(8, [])
    assert _native.verify_exact(pool, logits, []) == []
    for bad in (
        SampleOp(2, 0, sampler),
        SampleOp(-1, 0, sampler),
        SampleOp(0, 0, sampler, DraftTree([1, 1], [-1, 0])),
    ):
        with pytest.raises(ValueError, match="not there"):
            _native.verify_exact(pool, logits, [bad])
    for parents in ([0], [-2], [2**31 - 1]):
        with pytest.raises(ValueError, match="after its parent"):
            _native.verify_exact(pool, logits, [SampleOp(0, 0, sampler, DraftTree([1], parents))])
    with pytest.raises(ValueError, match="a parent for each"):
        _native.verify_exact(pool, logits, [SampleOp(0, 0, sampler, DraftTree([1], []))])
    with pytest.raises(ValueError, match="as wide"):
        _native.verify_exact(pool, np.zeros((2, 9), np.float32), [SampleOp(0, 0, sampler)])
    with pytest.raises(ValueError, match="one draw at a time"):
        _native.verify_exact(pool, logits, [SampleOp(0, 0, sampler), SampleOp(1, 1, sampler)])


class Passing(Sequence[SampleOp]):
    """Sample ops that are released, with their samplers, as soon as they have been read."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < 2:
            raise IndexError
        return SampleOp(0, 0, _native.Sampler(30, [1, 2], presence_penalty=1.0, seed=int(i)))


def test_samplers_stay_while_they_draw() -> None:
    logits = np.random.default_rng(0).normal(0, 1, (1, 30)).astype(np.float32)
    for _ in range(100):
        assert _native.verify_exact(_native.Pool(1), logits, Passing()) == _native.verify_exact(
            _native.Pool(1), logits, list(Passing())
        )


def test_a_sampler_is_used_by_one_thread_at_a_time() -> None:
    """Each sample changes the sampler's history of tokens."""
    sampler, row = (
        _native.Sampler(3000, [], presence_penalty=1.0),
        np.random.default_rng(0).normal(0, 1, 3000).astype(np.float32),
    )
    failures: set[str] = set()
    until = time.monotonic() + 60

    def draw() -> None:
        while not failures and time.monotonic() < until:
            try:
                sampler.draw(row, 0, 3)
            except RuntimeError as error:
                failures.add(str(error))

    threads = [threading.Thread(target=draw) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == {"the sampler is at work in another thread: one at a time"}


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_that_another_thread_writes_to(isa: str) -> None:
    """The result may be any token of the vocabulary."""
    row, ended = np.zeros(300, np.float32), threading.Event()

    def change() -> None:
        rng = np.random.default_rng(0)
        while not ended.is_set():
            row[:] = rng.choice(np.array([-np.inf, -1, 0, 1, 30, np.nan, np.inf], np.float32), 300)
            row[:] = 0

    other = threading.Thread(target=change)
    other.start()
    try:
        sampler = _native.Sampler(300, [], top_k=20, top_p=0.9, isa=isa)
        for i in range(3000):
            with suppress(NonFiniteLogitsError):
                token, _ = sampler.draw(row, i, 5)
                assert 0 <= token < 300
    finally:
        ended.set()
        other.join()


class TestForAcceptanceMethods:
    """Parts of a sampler that rejection sampling and typical acceptance use: the distribution of
    a sample, the uniform numbers of a position, appended tokens.
    """

    @pytest.mark.parametrize("isa", _native.isas())
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"temperature": 0.5, "top_k": 7},
            {"top_p": 0.6, "presence_penalty": 0.8},
            {"min_p": 0.1},
        ],
    )
    def test_probabilities_are_the_distribution_of_samples(
        self, isa: str, options: dict[str, Any]
    ) -> None:
        logits = np.random.default_rng(1).normal(0, 2, 40).astype(np.float32)
        sampler, numpy = (
            _native.Sampler(40, [3], seed=5, isa=isa, **options),
            twin.SamplerTwin(40, [3], seed=5, **options),
        )
        for token in (4, 4, 9):
            sampler.append(token)
            numpy.output.append(token)
        x = numpy.adjusted(logits, 3)
        kept = numpy.filtered(x, numpy.top_p)
        expected = np.zeros(40)
        expected[kept] = np.exp((x[kept].astype(np.float64) - x.max()) / numpy.temperature)
        np.testing.assert_allclose(
            sampler.probabilities(logits, 3), expected / expected.sum(), rtol=1e-6
        )
        assert sampler.draw(logits, 3, -1)[0] == numpy.draw(logits, 3)

    def test_greedy_probabilities_are_one_and_zero(self) -> None:
        logits = np.array([0, 5, 5, 1], np.float32)
        assert _native.Sampler(4, [], temperature=0.0).probabilities(logits, 0).tolist() == [
            0,
            1,
            0,
            0,
        ]

    def test_arguments_are_checked(self) -> None:
        sampler = _native.Sampler(4, [], presence_penalty=1.0)
        with pytest.raises(ValueError, match="as wide as the vocabulary"):
            sampler.probabilities(np.zeros(5, np.float32), 0)
        with pytest.raises(NonFiniteLogitsError):
            sampler.probabilities(np.full(4, np.nan, np.float32), 0)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            sampler.append(4)

    def test_uniforms_depend_on_seed_sequence_and_position(self) -> None:
        samplers = [
            _native.Sampler(4, [], seed=seed, seq_index=seq)
            for seed in (0, 2**40)
            for seq in (0, 1)
        ]
        values = np.array([s.uniforms(position) for s in samplers for position in range(5000)])
        assert len(np.unique(values)) == values.size and values.min() > 0 and values.max() < 1
        assert (
            np.abs(values.mean(axis=0) - 0.5).max() < 0.01
            and abs(np.corrcoef(values.T)[0, 1]) < 0.03
        )
        assert samplers[0].uniforms(7) == samplers[1].clone(0).uniforms(7)
        # Their Philox counter is not that of a draw, so no word is used twice.
        words = _native.philox([0, 7, 0, 1], [0, 0])
        assert samplers[0].uniforms(7)[0] == (((words[0] << 32 | words[1]) >> 11) + 0.5) * 2.0**-53
