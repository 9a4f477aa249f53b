"""Outputs that are one of many token sequences, drawn and searched for, against plain searches."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native
from headrace.backend import Executable, forward
from headrace.config import KvConfig
from headrace.errors import RequestError
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams, ThinkingBudget
from headrace.speculation.proposers.suffix import SuffixProposer
from headrace.structured_outputs import StructuredOutputs
from tests.acceptors.beam_twin import Beam, beam_search
from tests.backend.batches import Sequence, batch_of
from tests.engine.toy import VOCAB, toy_engine, toy_logits
from tests.tiny import run_all, tiny_engine, tiny_executable, tiny_model

PROMPT = [7, 8, 9, 10]
Items = list[list[int]]
Following = dict[tuple[int, ...], set[int]]


def one_of(items: Any) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputs(allowed_sequences=items)}


def following(items: Items, end_ids: tuple[int, ...] = ()) -> Following:
    """The tokens that may follow each beginning of an item; end tokens follow inner items."""
    tokens: Following = {}
    for item in items:
        for end, token in enumerate(item):
            tokens.setdefault(tuple(item[:end]), set()).add(token)
    for item in items:
        if tuple(item) in tokens:
            tokens[tuple(item)] |= set(end_ids)
    return tokens


def native_logprobs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The engine's own log-probabilities of all tokens of a row."""
    _, _, ids, logprobs = _native.token_logprobs(logits, 0, len(logits))
    row = np.full(len(logits), -np.inf)
    row[ids] = logprobs
    return row


def outputs_of(result: RequestOutput) -> list[tuple[list[int], float | None]]:
    assert result.error is None
    return [(output.token_ids, output.cumulative_logprob) for output in result.outputs]


@cache
def random_items(count: int, vocab: int, shortest: int, longest: int, seed: int = 0) -> Items:
    rng = np.random.default_rng(seed)
    items = set[tuple[int, ...]]()
    while len(items) < count:
        rows = rng.integers(0, vocab, (count, longest)).tolist()
        lengths = rng.integers(shortest, longest + 1, count).tolist()
        items |= {tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)}
    return [list(item) for item in sorted(items)[:: max(1, len(items) // count)]][:count]


class Scorer:
    """Computes the logits after tokens, each time from the first one, without an engine."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self.row = cache(self._row)

    def _row(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        batch = batch_of([Sequence([0], 32)], [list(tokens)], [([], [])], False)
        return forward(self._executable, batch).logits[-1].copy()


class TestBruteForce:
    """A width that covers all inner nodes of the trie finds the best of 50,000 items."""

    @pytest.mark.parametrize("width", [256, 512])
    def test_a_search_finds_the_best_items(self, width: int) -> None:
        vocab, prompt = 256, PROMPT
        model = tiny_model(3, vocab=vocab)
        rng = np.random.default_rng(width)
        num_last = -(-50_000 // width)
        items = [
            [first, second, last]
            for first in rng.choice(vocab, 16, replace=False).tolist()
            for second in rng.choice(vocab, width // 16, replace=False).tolist()
            for last in rng.choice(vocab, num_last, replace=False).tolist()
        ]
        assert len(items) >= 50_000
        scorer = Scorer(tiny_executable(model, "cpu", KvConfig((1,), 32, "f32")))
        rows = cache(lambda tokens: native_logprobs(scorer.row((*prompt, *tokens))))
        totals = [
            float(rows(())[a]) + float(rows((a,))[b]) + float(rows((a, b))[c]) for a, b, c in items
        ]
        ranked = sorted(zip(items, totals, strict=True), key=lambda pair: -pair[1])

        engine = tiny_engine(
            model,
            "cpu",
            kv_dtype="f32",
            threads=2,
            slots=64 * width,
            max_num_seqs=width,
            max_num_batched_tokens=width,
        )
        params = SamplingParams(beam_width=width, n=width, max_tokens=9, **one_of(items))
        (result,) = run_all(engine, [(prompt, params)])
        assert outputs_of(result) == [(item, total) for item, total in ranked[:width]]
        assert {output.finish_reason for output in result.outputs} == {"stop"}

        # The engine scores items that a prompt holds equally.
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
        for item, total in ranked[:width:97]:
            (scored,) = run_all(engine, [([*prompt, *item], scoring)])
            recorded = (scored.prompt_logprobs or [])[len(prompt) :]
            own = [entry[t].logprob for entry, t in zip(recorded, item, strict=True) if entry]
            assert float(own[0]) + own[1] + own[2] == total


def toy_search(
    prompt: list[int], params: SamplingParams, items: Items, end_ids: tuple[int, ...] = ()
) -> list[Beam]:
    tokens = following(items, end_ids)
    return beam_search(
        prompt,
        params,
        toy_logits,
        VOCAB,
        longest=10_000,
        allowed=lambda output: tokens.get(tuple(output), set()),
        logprobs=native_logprobs,
    )


class TestWideSearch:
    @pytest.mark.parametrize("width", [256, 512])
    def test_a_search_that_cannot_cover_the_trie_equals_the_twin(self, width: int) -> None:
        """50,000 items of three to six tokens, some of which begin others and need an end token."""
        items = random_items(50_000, VOCAB - 1, 3, 6)
        end = VOCAB - 1
        params = SamplingParams(
            beam_width=width, n=width, max_tokens=8, stop_token_ids=[end], **one_of(items)
        )
        expected = toy_search([1, 2], params, items, (end,))
        engine = toy_engine(num_blocks=6 * width, block_size=4, max_num_seqs=width)
        (result,) = run_all(engine, [([1, 2], params)])
        assert outputs_of(result) == [(beam.tokens, beam.total) for beam in expected]
        allowed = set(map(tuple, items))
        assert {tuple(t for t in beam.tokens if t != end) for beam in expected} <= allowed

    @pytest.mark.parametrize("width", [256, 512])
    def test_a_search_without_a_trie_equals_the_twin(self, width: int) -> None:
        params = SamplingParams(beam_width=width, n=width, max_tokens=4, stop_token_ids=[3, 5])
        expected = beam_search([4], params, toy_logits, VOCAB, 10_000, logprobs=native_logprobs)
        engine = toy_engine(num_blocks=6 * width, block_size=4, max_num_seqs=width)
        (result,) = run_all(engine, [([4], params)])
        assert outputs_of(result) == [(beam.tokens, beam.total) for beam in expected]

    def test_a_grammar_ranks_as_the_trie_of_its_texts(self) -> None:
        """A choice of texts, of which each has one way to be written."""
        texts = [a + b + c for a in "abcdefgh" for b in "klmnop" for c in "abcdefgh"]
        options: dict[str, Any] = {"beam_width": 40, "n": 40, "max_tokens": 8}
        results = run_all(
            toy_engine(num_blocks=400, max_num_seqs=40),
            [
                (
                    [1],
                    SamplingParams(structured_outputs=StructuredOutputs(choice=texts), **options),
                ),
                ([1], SamplingParams(**one_of(texts), **options)),
            ],
        )
        by_grammar, by_trie = map(outputs_of, results)
        assert by_grammar == by_trie and len(by_trie) == 40


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams, Items | None]:
    prompt = draw(st.sampled_from([[1, 2, 3], [4], [5, 4, 3, 2, 1, 6, 7], list(range(20))]))
    kind = draw(st.sampled_from(["beams", "beams", "drawn", "plain"]))
    items = random_items(draw(st.sampled_from([1, 7, 300])), VOCAB - 4, 2, 5)
    seed = draw(st.integers(0, 3))
    if kind == "plain":
        return prompt, SamplingParams(seed=seed, max_tokens=12), None
    if kind == "drawn":
        n = draw(st.sampled_from([1, 3]))
        return prompt, SamplingParams(seed=seed, n=n, max_tokens=9, **one_of(items)), items
    width = draw(st.sampled_from([1, 4, 12]))
    params = SamplingParams(
        beam_width=width,
        n=width,
        max_tokens=draw(st.sampled_from([3, 9])),
        logprobs=draw(st.sampled_from([None, 1])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        allowed_token_ids=draw(st.sampled_from([None, list(range(VOCAB - 2))])),
        **one_of(items),
    )
    return prompt, params, items


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(requests(), min_size=1, max_size=5),
    num_blocks=st.sampled_from([0, 6, 200]),
    prefix_cache=st.booleans(),
    drafts=st.booleans(),
    max_num_batched_tokens=st.sampled_from([12, 64]),
    stagger=st.integers(0, 2),
)
def test_searches_in_a_batch_equal_those_alone(
    asked: list[tuple[list[int], SamplingParams, Items | None]],
    num_blocks: int,
    drafts: bool,
    stagger: int,
    **config: Any,
) -> None:
    """Tiny pools preempt; drafts, forced tokens and the prefix cache change nothing."""
    make = partial(toy_engine, block_size=4, max_num_seqs=12, **config)
    alone = [run_all(make(num_blocks=400), [(prompt, params)])[0] for prompt, params, _ in asked]
    largest = max(len(p) // 4 + (params.beam_width or 1) * 8 for p, params, _ in asked)
    proposer = {"proposer": SuffixProposer(16)} if drafts else {}
    engine = make(num_blocks=largest + num_blocks, **proposer)
    ids, updates = [], []
    for prompt, params, _ in asked:
        ids.append(engine.add_request(prompt, params))
        for _ in range(stagger):
            updates += engine.step()
    while engine.has_work:
        updates += engine.step()
    results = {update.request_id: update.result for update in updates if update.result}
    for request_id, expected, (_, params, items) in zip(ids, alone, asked, strict=True):
        found = results[request_id]
        assert found.outputs == expected.outputs and str(found.error) == str(expected.error)
        for output in found.outputs:
            if items and output.finish_reason == "stop":
                assert output.token_ids in items
                assert params.beam_width is None or output.cumulative_logprob is not None
    stats = engine.stats()
    assert (stats.blocks_free, stats.running, stats.waiting) == (stats.blocks_total, 0, 0)


def test_wide_searches_with_other_requests_on_a_model() -> None:
    """Four searches of width 64 share the prefix of their prompts, and other requests run too."""
    model = tiny_model(5, vocab=256)
    items = random_items(2000, 256, 2, 4)
    search = SamplingParams(beam_width=64, n=64, max_tokens=6, **one_of(items))
    prefix = list(range(40, 80))
    asked: list[tuple[list[int], SamplingParams]] = [
        *(([*prefix, i], search) for i in range(4)),
        (prefix, SamplingParams(seed=1, n=3, max_tokens=30, logprobs=1)),
        ([1, 2, 3], SamplingParams(temperature=0, max_tokens=40)),
    ]
    make: Callable[..., Any] = partial(
        tiny_engine,
        model,
        "cpu",
        kv_dtype="f32",
        threads=2,
        max_num_seqs=64,
        max_num_batched_tokens=80,
    )
    alone = [run_all(make(slots=64 * 64), [request])[0].outputs for request in asked]
    engine = make(slots=(64 + 8) * 32)
    assert [result.outputs for result in run_all(engine, asked)] == alone


class TestOneOutput:
    def test_every_kind_of_sampling_gives_an_item(self) -> None:
        items = random_items(500, VOCAB, 2, 6)
        results = run_all(
            toy_engine(num_blocks=400),
            [
                ([i], SamplingParams(seed=i, n=4, temperature=t, max_tokens=9, **one_of(items)))
                for i in range(5)
                for t in (0.0, 1.0)
            ],
        )
        for result in results:
            for output in result.outputs:
                assert output.token_ids in items and output.finish_reason == "stop"

    def test_certain_tokens_need_no_step_of_their_own(self) -> None:
        engine = toy_engine()
        item = [1, 2, 3, 4, 5, 6, 7]
        (result,) = run_all(engine, [([9], SamplingParams(max_tokens=9, **one_of([item, [2, 1]])))])
        assert result.outputs[0].token_ids in (item, [2, 1])
        (result,) = run_all(engine, [([9], SamplingParams(max_tokens=9, **one_of([item])))])
        assert result.outputs[0].token_ids == item
        assert engine.stats().forced >= len(item) - 2

    def test_the_last_token_may_be_an_end_token(self) -> None:
        items = [[1, 2, 0], [1, 2, 3, 0], [4, 0]]
        params = SamplingParams(
            beam_width=3, n=3, max_tokens=9, stop_token_ids=[0], **one_of(items)
        )
        (result,) = run_all(toy_engine(num_blocks=400), [([9], params)])
        assert {tuple(output.token_ids) for output in result.outputs} == set(map(tuple, items))
        assert {output.stop_reason for output in result.outputs} == {0}

    def test_an_item_that_begins_another_needs_an_end_token(self) -> None:
        items = [[1], [1, 2]]
        params = SamplingParams(n=20, seed=1, max_tokens=9, stop_token_ids=[0], **one_of(items))
        (result,) = run_all(toy_engine(num_blocks=400), [([9], params)])
        assert {tuple(output.token_ids) for output in result.outputs} == {(1, 0), (1, 2)}

    def test_texts_have_the_tokens_of_the_tokenizer(self) -> None:
        params = SamplingParams(n=20, seed=1, max_tokens=9, **one_of(["abab", "cab", [3, 1]]))
        (result,) = run_all(toy_engine(num_blocks=400), [([9], params)])
        assert {output.text for output in result.outputs} == {"abab", "cab", "db"}

    def test_other_rules_hold_as_well(self) -> None:
        items = [[1, 2], [3, 4], [5, 6]]
        for options in ({"n": 9, "seed": 2}, {"beam_width": 3, "n": 3}):
            params = SamplingParams(
                max_tokens=9, allowed_token_ids=[3, 4, 5], **options, **one_of(items)
            )
            (result,) = run_all(toy_engine(num_blocks=400), [([9], params)])
            ends = [(output.token_ids, output.finish_reason) for output in result.outputs]
            assert ([3, 4], "stop") in ends and {tokens[0] for tokens, _ in ends} <= {3, 5}

    def test_a_limit_of_tokens_cuts_an_item_short(self) -> None:
        for options in ({}, {"beam_width": 2}):
            params = SamplingParams(max_tokens=2, **options, **one_of([[1, 2, 3]]))
            (result,) = run_all(toy_engine(), [([9], params)])
            assert result.outputs[0].token_ids == [1, 2]
            assert result.outputs[0].finish_reason == "length"

    def test_equal_lists_share_a_trie(self) -> None:
        engine = toy_engine()
        for items in (
            random_items(300, VOCAB, 2, 5),
            [list(i) for i in random_items(300, VOCAB, 2, 5)],
        ):
            engine.add_request([1], SamplingParams(**one_of(items)))
        engine.add_request([1], SamplingParams(**one_of([[1, 2]])))
        tries = engine._constraints._tries._tries
        assert [trie.num_sequences for trie in tries.values()] == [300, 1]

    def test_the_cache_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headrace.grammar.tries._MAX_BYTES", 100)
        engine = toy_engine()
        for first in range(10):
            engine.add_request([1], SamplingParams(**one_of([[first, 2, 3]])))
        assert 1 <= len(engine._constraints._tries._tries) <= 3

    @pytest.mark.parametrize(
        ("items", "options", "message"),
        [
            ([[1], [2, 99]], {}, r"allowed_sequences\[1\] has token 99, but the vocabulary ends"),
            (["a", "é€ß"], {}, r"allowed_sequences\[1\]: the tokenizer cannot write 'é€ß'"),
            ([[1, 0, 2]], {"stop_token_ids": [0]}, "continues after the end token 0"),
            ([[1, 2]], {"allowed_token_ids": [2]}, "no token can follow"),
        ],
    )
    def test_sequences_that_are_refused(
        self, items: Any, options: dict[str, Any], message: str
    ) -> None:
        engine = toy_engine()
        with pytest.raises(RequestError, match=message):
            engine.add_request([1], SamplingParams(**options, **one_of(items)))
        assert not engine.has_work

    def test_reasoning_may_come_first(self) -> None:
        """The budget forces the end marker only where the trie allows it."""
        budget = ThinkingBudget(max_tokens=1, begin="t", end="r")
        params = SamplingParams(thinking_budget=budget, max_tokens=5, **one_of([[1, 2], [3, 4]]))
        (result,) = run_all(toy_engine(), [([9], params)])
        assert result.outputs[0].token_ids in ([1, 2], [3, 4])
