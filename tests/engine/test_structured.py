"""Structured outputs over tiny models: outputs match their grammar, and are equal in any
batch.
"""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.errors import ConstraintError, RequestError
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams, ThinkingBudget
from headrace.speculation.proposers import PROPOSERS, REQUIRED_OPTIONS
from headrace.structured_outputs import StructuredOutputs
from tests.draft_engines import draft_engine
from tests.engine.test_promise import LOADS, Ask, keeps_the_promise, same, truth
from tests.json_vocabulary import EOS, VOCAB, JsonVocabulary
from tests.random_trees import RandomTrees
from tests.tiny import run_all, tiny_engine, tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["abc", "name", "na"]},
        "m": {
            "type": "array",
            "items": {"type": "integer", "minimum": -5, "maximum": 120},
            "maxItems": 3,
        },
        "a": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"$ref": "#/$defs/inner"}]},
    },
    "required": ["name", "m", "a"],
    "additionalProperties": False,
    "$defs": {
        "inner": {
            "type": "object",
            "properties": {"t": {"type": "string", "pattern": "^[ab]{1,4}$"}},
            "required": ["t"],
        }
    },
}
REGEX = r"name: (a|bc)+\.[0-9]{2,4}"
CHOICE = ["abc", "ab", "name", "null and true"]
GRAMMAR = 'start: item (", " item)*\nitem: /[0-9]{1,2}/ | "[" start "]"'
ITEMS = [*CHOICE, [7, 8], [7, 8, 9], [50, 3, 50, 3, 1]]
PLAIN = 10
"""The first request without a grammar."""


def asking(**asked: Any) -> dict[str, Any]:
    """Return the parameter for a grammar."""
    return {"structured_outputs": StructuredOutputs(**asked)}


REQUESTS: list[Ask] = [
    (
        [7, 8, 9, 7, 8, 9],
        SamplingParams(temperature=0, max_tokens=50, logprobs=2, **asking(json=SCHEMA)),
    ),
    (
        [3],
        SamplingParams(seed=1, n=3, max_tokens=60, logprobs=0, **asking(json=json.dumps(SCHEMA))),
    ),
    (
        [4, 5],
        SamplingParams(seed=2, max_tokens=40, temperature=1.4, logprobs=1, **asking(regex=REGEX)),
    ),
    ([6] * 20, SamplingParams(seed=3, n=4, top_p=0.9, max_tokens=12, **asking(choice=CHOICE))),
    ([9, 2, 9, 2], SamplingParams(seed=4, max_tokens=24, logprobs=0, **asking(json_object=True))),
    (
        list(range(30)),
        SamplingParams(
            seed=5,
            max_tokens=30,
            presence_penalty=0.5,
            prompt_logprobs=1,
            **asking(grammar=GRAMMAR),
        ),
    ),
    ([1, 2], SamplingParams(beam_width=3, n=2, max_tokens=20, logprobs=1, **asking(regex=REGEX))),
    (
        [5, 5],
        SamplingParams(
            seed=6, max_tokens=30, ignore_eos=True, bad_words=["na", "10"], **asking(json=SCHEMA)
        ),
    ),
    (
        [6] * 20,
        SamplingParams(
            seed=3, n=3, max_tokens=12, bad_words=["na"], **asking(allowed_sequences=ITEMS)
        ),
    ),
    (
        [6, 1],
        SamplingParams(
            beam_width=3, n=3, max_tokens=12, logprobs=1, **asking(allowed_sequences=ITEMS)
        ),
    ),
    (
        [7, 8, 9, 7, 8, 9, 7, 8],
        SamplingParams(temperature=0, max_tokens=20, logprobs=3, ignore_eos=True),
    ),
    (
        [2, 4] * 5,
        SamplingParams(
            n=2, seed=7, temperature=0.5, max_tokens=10, repetition_penalty=1.2, logprobs=0
        ),
    ),
    (
        [2, 4] * 3,
        SamplingParams(seed=8, max_tokens=14, logprobs=1, allowed_token_ids=[0, 7, 9, 33, 60]),
    ),
    (
        [1],
        SamplingParams(
            temperature=0, max_tokens=20, logprobs=0, bad_words=["ab", "name", "{"], ignore_eos=True
        ),
    ),
    (
        [7, 8, 9, 0],
        SamplingParams(
            seed=9,
            n=2,
            max_tokens=24,
            logprobs=1,
            ignore_eos=True,
            thinking_budget=ThinkingBudget(max_tokens=5, begin="{", end="null,"),
        ),
    ),
]


@cache
def model(which: int) -> Any:
    return tiny_model([11, 12][which], vocab=VOCAB, window=[0, 9][which], context=128)


def engine_of(
    which: int = 0, backend: str = "cpu", eos_ids: tuple[int, ...] = EOS, **options: Any
) -> Engine:
    return tiny_engine(model(which), backend, vocabulary=JsonVocabulary(eos_ids), **options)


@cache
def alone(which: int, kv_dtype: Any = "f32") -> list[RequestOutput]:
    """Run each request by itself, token by token."""
    engine = engine_of(
        which,
        kv_dtype=kv_dtype,
        prefix_cache=False,
        jump_forward=False,
        release_outside_window=False,
    )
    return [run_all(engine, [request])[0] for request in REQUESTS]


def complete(params: SamplingParams, text: str) -> bool:
    """Whether a text matches the grammar."""
    asked = params.structured_outputs
    if asked is None:
        return True
    if asked.regex is not None:
        return re.fullmatch(asked.regex, text) is not None
    if asked.choice is not None:
        return text in asked.choice
    if asked.allowed_sequences is not None:
        vocabulary = JsonVocabulary()
        items = [
            item if isinstance(item, str) else vocabulary.decode(list(item))
            for item in asked.allowed_sequences
        ]
        return text in items
    if asked.grammar is not None:
        return re.fullmatch(r"[0-9]{1,2}", re.sub(r", [0-9]{1,2}", "", collapsed(text))) is not None
    try:
        value = json.loads(text)
        jsonschema.validate(
            value, {"type": "object"} if asked.json is None else json.loads(str(asked.json))
        )
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def collapsed(text: str) -> str:
    """Replace the innermost lists of the grammar by numbers until none is left."""
    while text != (text := re.sub(r"\[[0-9]{1,2}(, [0-9]{1,2})*\]", "0", text)):
        pass
    return text


@settings(max_examples=60, deadline=None)
@given(
    which=st.integers(0, PLAIN - 1),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 0.7, 3.0]),
    backend=st.sampled_from(["cpu", "reference"]),
)
def test_output_matches_the_grammar(
    which: int, seed: int, temperature: float, backend: str
) -> None:
    prompt, params = REQUESTS[which]
    drawn: dict[str, Any] = (
        {"temperature": temperature, "seed": seed} if params.beam_width is None else {}
    )
    asked = replace(params, **drawn, max_tokens=90, ignore_eos=False)
    (result,) = run_all(engine_of(seed % 2, backend, slots=800), [(prompt, asked)])
    for output in result.outputs:
        assert asked.structured_outputs is not None
        is_item = asked.structured_outputs.allowed_sequences is not None
        assert output.finish_reason == "length" or (
            complete(asked, output.text) and (is_item or output.token_ids[-1] in EOS)
        )


def test_structured_requests_end() -> None:
    results = [output for result in alone(0)[:PLAIN] for output in result.outputs]
    assert sum(output.finish_reason == "stop" for output in results) > len(results) // 2


ORDERS = st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=10)
COMING = LOADS | {
    "which": st.integers(0, 1),
    "order": ORDERS,
    "slots": st.sampled_from([160, 320, 1600]),
    "max_num_batched_tokens": st.sampled_from([3, 5, 8, 17, 64]),
    "max_num_seqs": st.sampled_from([3, 5, 32]),
}


@settings(max_examples=70, deadline=None)
@given(
    drafts=st.sampled_from(
        [*(name for name in PROPOSERS if name not in REQUIRED_OPTIONS), "trees", "wide trees"]
    ),
    seed=st.integers(0, 1000),
    jump_forward=st.booleans(),
    batching=st.sampled_from(["inflight", "inflight", "static"]),
    **COMING,
)
def test_same_request_same_tokens(
    which: int, order: list[int], kv_dtype: Any, drafts: str, seed: int, stagger: int, **config: Any
) -> None:
    expected = alone(which, kv_dtype)
    nodes = {"trees": 9, "wide trees": 70}.get(drafts)
    proposer = RandomTrees(seed, VOCAB, truth(expected, order), nodes) if nodes else drafts
    config |= (
        {"slots": 1600, "max_num_batched_tokens": 64, "max_num_seqs": 32}
        if config["batching"] == "static"
        else {}
    )
    engine = engine_of(which, proposer=proposer, kv_dtype=kv_dtype, **config)
    keeps_the_promise(engine, order, stagger, expected, exact=True, requests=REQUESTS)


@pytest.mark.parametrize(
    "options",
    [
        {"multi_step_ms": 1e6},
        {"late": True},
        {"slots": 160},
        {"max_num_batched_tokens": 3},
        {"batching": "static"},
        {"threads": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("which", range(len(REQUESTS)))
def test_structured_requests_in_one_batch(which: int, options: dict[str, Any]) -> None:
    engine = engine_of(**{"slots": 1600, "kv_dtype": "f32", **options})
    keeps_the_promise(engine, [which] * 2, 1, alone(0), exact=True, requests=REQUESTS)


@settings(max_examples=25, deadline=None)
@given(
    how=st.sampled_from(["draft_model", "self_draft", "medusa", "auto"]),
    depth=st.integers(1, 5),
    width=st.integers(1, 3),
    order=ORDERS,
    jump_forward=st.booleans(),
    adaptive_speculation=st.booleans(),
)
@example(
    how="draft_model", depth=1, width=2, order=[0], jump_forward=False, adaptive_speculation=False
)  # a mask is no wider than a token
def test_structured_outputs_with_draft_models(how: str, order: list[int], **options: Any) -> None:
    engine, _ = draft_engine(
        model(0), how, draft=model(1), vocabulary=JsonVocabulary(), slots=1600, **options
    )
    keeps_the_promise(engine, order, 1, alone(0), exact=True, requests=REQUESTS)


def test_padding_of_a_static_batch_has_no_drafts() -> None:
    engine, _ = draft_engine(
        model(0),
        "draft_model",
        draft=model(1),
        vocabulary=JsonVocabulary(),
        slots=1600,
        batching="static",
        adaptive_speculation=False,
    )
    order = [3, 0, 2]  # the first ends long before the others
    keeps_the_promise(engine, order, 0, alone(0), exact=True, requests=REQUESTS)
    stats = engine.stats()
    assert stats.proposer_failures == 0 < stats.drafted


@pytest.mark.parametrize("method", ["rejection", "typical"])
@settings(max_examples=10, deadline=None)
@given(
    which=st.integers(0, PLAIN - 1),
    depth=st.integers(1, 4),
    jump_forward=st.booleans(),
    seed=st.integers(0, 99),
)
def test_structured_outputs_with_other_acceptance_methods(
    method: Any, which: int, depth: int, jump_forward: bool, seed: int
) -> None:
    """The tokens depend on the drafts, but they still match the grammar."""
    prompt, params = REQUESTS[which]
    options = {
        "acceptance_method": method,
        "jump_forward": jump_forward,
        "adaptive_speculation": False,
    }
    engine, _ = draft_engine(
        model(0),
        "draft_model",
        draft=model(1),
        vocabulary=JsonVocabulary(),
        depth=depth,
        slots=800,
        **options,
    )
    asked = SamplingParams(
        n=params.n, seed=seed, max_tokens=100, structured_outputs=params.structured_outputs
    )
    (result,) = run_all(engine, [(prompt, asked)])
    assert all(
        output.finish_reason == "length" or complete(asked, output.text)
        for output in result.outputs
    )
    assert (
        engine.stats().proposer_failures == 0
        and engine.stats().blocks_free == engine.stats().blocks_total
    )


def test_structured_outputs_do_not_change_other_requests() -> None:
    plain = tiny_engine(model(0), "cpu", vocabulary=JsonVocabulary(), kv_dtype="f32")
    neighbours = [REQUESTS[PLAIN], REQUESTS[PLAIN + 1]]
    together = run_all(engine_of(kv_dtype="f32"), [*REQUESTS[:PLAIN], *neighbours])[PLAIN:]
    for one, other in zip(together, run_all(plain, neighbours), strict=True):
        same(one, other, exact=True)


class TestJumpForward:
    def test_forced_tokens_save_steps_and_are_no_drafts(self) -> None:
        request = REQUESTS[0]
        one_by_one, jumping = engine_of(jump_forward=False), engine_of()
        (expected,), (result,) = run_all(one_by_one, [request]), run_all(jumping, [request])
        same(result, expected, exact=True)
        before, after = one_by_one.stats(), jumping.stats()
        assert (
            before.forced == 0 and after.forced >= 5 and before.steps == after.steps + after.forced
        )
        assert (after.drafted, after.accepted, result.drafts) == (0, 0, {})

    def test_forced_tokens_are_limited_by_max_draft_tokens(self) -> None:
        asked = SamplingParams(temperature=0, max_tokens=40, **asking(choice=["0123456789" * 2]))
        for most, steps in ((0, 21), (4, 5), (100, 1)):
            engine = engine_of(max_draft_tokens=max(most, 1), jump_forward=most > 0)
            (result,) = run_all(engine, [([1], asked)])
            assert result.outputs[0].text == "0123456789" * 2 and engine.stats().steps == steps

    def test_proposers_do_not_learn_from_forced_tokens(self) -> None:
        proposer = RandomTrees(0, VOCAB, {}, right=0)
        engine = engine_of(proposer=proposer)
        run_all(
            engine,
            [([1], SamplingParams(temperature=0, max_tokens=40, **asking(choice=["0123456789"])))],
        )
        assert engine.stats().forced and not any(
            commit.draft.tokens for commit in proposer.commits if len(commit.tokens) > 1
        )

    def test_jump_forward_is_on_by_default(self) -> None:
        assert EngineConfig().jump_forward


class TestTheEnd:
    def test_only_end_tokens_end_a_structured_output(self) -> None:
        seen = set()
        for seed in range(30):
            asked = SamplingParams(
                seed=seed, temperature=3.0, stop_token_ids=[29], **asking(choice=["ab", "na"])
            )
            (output,) = run_all(engine_of(), [([seed], asked)])[0].outputs
            seen.add(output.token_ids[-1])
            assert output.text in ("ab", "na") and output.finish_reason == "stop"
            assert output.stop_reason == (29 if output.token_ids[-1] == 29 else None)
        assert seen == {*EOS, 29}

    def test_a_stop_token_that_is_text_does_not_end_an_incomplete_text(self) -> None:
        letter = JsonVocabulary().encode("a", False)
        asked = SamplingParams(
            seed=0,
            n=8,
            stop_token_ids=letter,
            logit_bias={letter[0]: 20.0},
            **asking(regex="(ab|na){2}"),
        )
        for output in run_all(engine_of(), [([4], asked)])[0].outputs:
            assert output.stop_reason == letter[0]
            assert re.fullmatch(
                "(ab|na){2}|(ab|na)?n", output.text
            )  # only the letter may follow an n

    @pytest.mark.parametrize(
        ("eos_ids", "params"), [((), {}), (EOS, {"ignore_eos": True}), (EOS, {"min_tokens": 16})]
    )
    @pytest.mark.parametrize("drafts", ["off", "suffix"])
    def test_without_end_tokens_it_ends_when_the_text_is_complete(
        self, eos_ids: tuple[int, ...], params: dict[str, Any], drafts: str
    ) -> None:
        asked = SamplingParams(seed=0, n=3, **asking(choice=CHOICE[1:]), **params)
        engine = engine_of(eos_ids=eos_ids, proposer=drafts)
        for output in run_all(engine, [([4], asked)])[0].outputs:
            assert (
                output.text in CHOICE
                and output.finish_reason == "stop"
                and output.stop_reason is None
            )
            assert not set(output.token_ids) & set(EOS)
        assert engine.stats().blocks_free == engine.stats().blocks_total

    def test_text_that_could_continue_is_cut_by_the_length(self) -> None:
        asked = SamplingParams(seed=0, max_tokens=7, ignore_eos=True, **asking(regex="a+"))
        (output,) = run_all(engine_of(), [([4], asked)])[0].outputs
        assert re.fullmatch("a{7}", output.text) and output.finish_reason == "length"

    def test_a_control_token_is_no_text(self) -> None:
        """Its spelling would match the grammar."""
        asked = SamplingParams(
            seed=0, n=8, temperature=5.0, logit_bias={59: 50.0}, **asking(regex="(ab){3}")
        )
        for output in run_all(engine_of(), [([4], asked)])[0].outputs:
            assert (
                output.text == "ababab" and output.token_ids.index(59) == len(output.token_ids) - 1
            )


class TestFailures:
    def test_a_dead_end_fails_its_request_alone(self) -> None:
        vocabulary = JsonVocabulary()
        vocabulary.pieces[vocabulary.pieces.index(b"z")] = b"zz"
        engine = tiny_engine(model(0), "cpu", vocabulary=vocabulary, kv_dtype="f32")
        dead = SamplingParams(seed=0, n=2, temperature=0.01, **asking(regex="a(z|zq)"))
        beams = SamplingParams(beam_width=2, **asking(regex="a(z|zq)"))
        results = run_all(engine, [REQUESTS[PLAIN], ([1], dead), ([1], beams)])
        same(results[0], run_all(engine, [REQUESTS[PLAIN]])[0], exact=True)
        for result in results[1:]:
            assert isinstance(result.error, ConstraintError)
            assert all(output.finish_reason == "error" for output in result.outputs)
        assert engine.stats().blocks_free == engine.stats().blocks_total and not engine.has_work

    def test_a_dead_end_ends_its_output_alone(self) -> None:
        """What the other outputs of the request are does not depend on the batch."""
        vocabulary = JsonVocabulary()
        vocabulary.pieces[vocabulary.pieces.index(b"z")] = b"zz"
        regex = "a[zs]{3}z|b+"  # a dead end if `zz` is too long
        asked = SamplingParams(seed=0, n=12, temperature=5.0, max_tokens=30, **asking(regex=regex))
        request = ([1], asked)
        options = {"vocabulary": vocabulary, "kv_dtype": "f32", "slots": 3200}
        (expected,) = run_all(tiny_engine(model(0), "cpu", **options), [request])
        reasons = {output.finish_reason for output in expected.outputs}
        assert reasons == {"error", "stop"} and isinstance(expected.error, ConstraintError)
        for output in expected.outputs:
            is_dead = output.finish_reason == "error"
            assert is_dead or re.fullmatch(regex, output.text)

        known = truth([expected], [0])
        others: list[dict[str, Any]] = [
            {"proposer": RandomTrees(3, VOCAB, known, 9)},
            {"proposer": "suffix", "slots": 320},
            {"batching": "static"},
        ]
        for other in others:
            engine = tiny_engine(model(0), "cpu", **options | other)
            result = run_all(engine, [request, REQUESTS[PLAIN]])[0]
            same(result, expected, exact=True)
            assert str(result.error) == str(expected.error)
            assert engine.stats().blocks_free == engine.stats().blocks_total

    def test_a_grammar_without_any_text_is_refused(self) -> None:
        engine = engine_of()
        for asked, message in (
            (SamplingParams(**asking(regex="q")), "regex allows no text"),
            (SamplingParams(allowed_token_ids=[5], **asking(choice=["a"])), "no token can follow"),
            (
                SamplingParams(
                    allowed_token_ids=[5], bad_words=[JsonVocabulary().pieces[5].decode()]
                ),
                "no token can follow",
            ),
            (SamplingParams(**asking(regex="(")), "regex cannot be compiled"),
        ):
            with pytest.raises(RequestError, match=message):
                engine.add_request([1], asked)
        assert engine.stats().refused == 4 and not engine.has_work

    def test_abort_a_structured_request(self) -> None:
        engine = engine_of()
        request_id = engine.add_request(*REQUESTS[1])
        for _ in range(4):
            engine.step()
        result = engine.abort(request_id)
        assert result and all(output.finish_reason == "abort" for output in result.outputs)
        assert engine.stats().blocks_free == engine.stats().blocks_total


class TestAllowedTokens:
    @pytest.mark.parametrize("late", [False, True])
    def test_only_allowed_tokens_are_sampled(self, late: bool) -> None:
        asked = SamplingParams(
            seed=1,
            temperature=5.0,
            max_tokens=40,
            allowed_token_ids=[3, VOCAB - 1],
            ignore_eos=True,
        )
        engine = engine_of(late=late, multi_step_ms=1e6)
        (output,) = run_all(engine, [([1], asked)])[0].outputs
        assert set(output.token_ids) == {3, VOCAB - 1}

    @pytest.mark.parametrize("token", [VOCAB, -1, 2**31])
    def test_ids_outside_the_vocabulary_are_refused(self, token: int) -> None:
        with pytest.raises(RequestError, match="allowed_token_ids"):
            engine_of().add_request([1], SamplingParams(allowed_token_ids=[1, token]))


class TestBadWords:
    def test_bad_words_are_never_sampled(self) -> None:
        words = ["ab", "name", "0", "{}"]
        plain = SamplingParams(
            seed=0,
            n=16,
            max_tokens=60,
            ignore_eos=True,
            logit_bias=dict.fromkeys((0, 1, 10, 11), 6.0),
        )
        spelt = [
            tuple(JsonVocabulary().encode(space + word, False))
            for word in words
            for space in ("", " ")
        ]

        def found(params: SamplingParams) -> set[tuple[int, ...]]:
            outputs = [
                output.token_ids
                for output in run_all(engine_of(slots=3200), [([1], params)])[0].outputs
            ]
            runs = {
                tuple(ids[i : i + size])
                for ids in outputs
                for size in (1, 2)
                for i in range(len(ids) - size + 1)
            }
            return runs & set(spelt)

        assert len({*found(plain)} & {word for word in spelt if len(word) > 1}) > 0
        assert found(replace(plain, bad_words=words)) == set()
