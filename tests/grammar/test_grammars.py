"""Grammars over several kinds of tokenizers: random texts that they allow are valid."""

import json
import random
import re
import sys
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checkpoint.tokenizer_hf import tokenizer_from_folder
from headrace.constraint import GrammarState, mask_words
from headrace.errors import ConstraintError, RequestError
from headrace.grammar.grammars import Grammars
from headrace.structured_outputs import StructuredOutputs
from tests.checkpoint.conftest import DATA, sentencepiece_parts, write_tiny_gguf
from tests.checkpoint.test_tokenizer import byte_level, save, spaces_and_bytes
from tests.json_vocabulary import EOS, VOCAB, JsonVocabulary

BEYOND = 37
"""Logits without a token."""

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["age"],
    },
    {
        "type": "array",
        "items": {"enum": ["red", "bleu é", 3, None, True]},
        "minItems": 2,
        "maxItems": 5,
    },
    {
        "$defs": {
            "n": {
                "properties": {"v": {"type": "number"}, "n": {"$ref": "#/$defs/n"}},
                "required": ["v"],
            }
        },
        "$ref": "#/$defs/n",
    },
    {
        "anyOf": [
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            {"type": "integer", "minimum": -17, "maximum": 204},
        ]
    },
    {
        "type": "object",
        "properties": {"d": {"type": "string", "format": "date"}, "k": {"const": "日本"}},
        "required": ["d", "k"],
    },
]


@pytest.fixture(
    scope="module",
    params=["default model", "SentencePiece of a GGUF", "byte-level", "bytes as tokens"],
)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "default model":
        return open_checkpoint(resolve("smollm2", progress=False)).load_tokenizer()
    if request.param == "SentencePiece of a GGUF":
        return open_checkpoint(
            write_tiny_gguf(folder / "tiny.gguf", **sentencepiece_parts())
        ).load_tokenizer()
    make = byte_level if request.param == "byte-level" else spaces_and_bytes
    return tokenizer_from_folder(save(folder, *make((DATA / "nll_text.txt").read_text())))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size + BEYOND)


def allowed(state: GrammarState, vocab_size: int) -> list[int]:
    mask = np.empty(mask_words(vocab_size), np.uint32)
    state.fill(mask)
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def random_text(
    state: GrammarState, tokenizer: Tokenizer, rng: random.Random, most: int = 150
) -> str | None:
    """A random text that the grammar allows; None if it is not complete.

    It prefers tokens that begin with a digit or close something.
    """
    ids: list[int] = []
    state = state.clone()
    while found := allowed(state, tokenizer.vocab_size + BEYOND):
        if (state.is_complete and rng.random() < 0.5) or len(ids) == most:
            break
        assert max(found) < tokenizer.vocab_size and tokenizer.special_ids.isdisjoint(found)
        found = rng.sample(found, min(len(found), 300))
        closing = [token for token in found if set(tokenizer.token_bytes(token)) & set(b'"]}')]
        ids.append(rng.choice(closing if closing and rng.random() < 0.5 else found))
        state.advance(ids[-1])
    decoder = tokenizer.decoder(continues=True)
    return "".join(map(decoder.push, ids)) + decoder.flush() if state.is_complete else None


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: next(iter(schema)))
def test_json_follows_its_schema(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    state, num_complete = grammars.compile(StructuredOutputs(json=schema)), 0
    for seed in range(5):
        text = random_text(state, tokenizer, random.Random(seed))
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            num_complete += 1
    assert num_complete > 0


@pytest.mark.parametrize(
    "regex",
    [
        r"[a-z]{3}-[0-9]{2}|x+y",
        r"(yes|no|mañana)( again)*",
        r'"(/|\\|\n)"',
        r"日+本",
        "(a+)+b",
        r" leading|  two",
        "\\u00e9?e",
    ],
)
def test_text_matches_its_expression(grammars: Grammars, tokenizer: Tokenizer, regex: str) -> None:
    state = grammars.compile(StructuredOutputs(regex=regex))
    texts = [random_text(state, tokenizer, random.Random(seed)) for seed in range(6)]
    assert any(text is not None for text in texts)
    assert all(text is None or re.fullmatch(regex, text) for text in texts)


def test_a_choice_is_one_of_its_texts(grammars: Grammars, tokenizer: Tokenizer) -> None:
    choice = [
        "yes",
        "yes, but",
        " no",
        'a "quote" \\ \n',
        "日本",
        "</s>",
        "<|im_end|>",
        "a\0b",
        "a",
        "b",
    ]
    state = grammars.compile(StructuredOutputs(choice=choice))
    texts = {random_text(state, tokenizer, random.Random(seed)) for seed in range(60)}
    assert texts <= set(choice) and len(texts) > 5


def test_a_forced_text_has_one_token_at_each_place(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """They are the tokenizer's own tokens if it can encode the text."""
    text = "the quick brown fox jumps over the lazy dog, 1234 times"
    state, ids = grammars.compile(StructuredOutputs(choice=[text])), []
    while found := allowed(state, tokenizer.vocab_size + BEYOND):
        assert len(found) == 1
        ids += found
        state.advance(found[0])
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    if not tokenizer.vocabulary.strip_space:
        assert ids == tokenizer.encode(text, add_special=False)


def test_a_state_moves_forward_and_back(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """After any moves its mask is the mask of a new state that reads the same tokens."""
    size, rng = tokenizer.vocab_size + BEYOND, random.Random(0)
    begin = grammars.compile(StructuredOutputs(regex="(a|b)(c|d)*([0-9]{2})?"))
    state, path = begin.clone(), list[int]()
    for _ in range(80):
        found = allowed(state, size)
        if path and (not found or rng.random() < 0.4):
            count = rng.randint(1, len(path))
            state.rollback(count)
            del path[len(path) - count :]
        else:
            path.append(rng.choice(found))
            state.advance(path[-1])
        fresh = begin.clone()
        for token in path:
            fresh.advance(token)
        assert allowed(state, size) == allowed(fresh, size)
        assert (state.is_complete, state.num_bytes) == (fresh.is_complete, fresh.num_bytes)
    assert not begin.is_complete


def test_rollback_forgets_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size + BEYOND
    state = grammars.compile(StructuredOutputs(regex="(a|b)(c|d)*"))
    state.advance(allowed(state, size)[0])
    seen = allowed(state, size)
    for _ in range(2):
        with pytest.raises(ConstraintError, match="cannot continue"):
            state.advance(next(token for token in range(size) if token not in seen))
    state.rollback(2)
    assert allowed(state, size) == seen and state.is_complete


SMALL = Grammars(JsonVocabulary(), VOCAB)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"regex": "(a"}, "regex cannot be compiled: .*unclosed group"),
        ({"regex": "(?=a)b"}, "regex cannot be compiled: .*look-around"),
        ({"regex": r"(a)\1"}, "regex cannot be compiled"),
        ({"regex": "a{1000000}"}, "regex repeats something 1,000,000 times"),
        ({"regex": "a{2,99999}"}, "regex repeats"),
        ({"regex": "((a{100}){50}){3}"}, "regex repeats something 15,000 times"),
        ({"regex": r"[^\s\S]"}, "regex allows no text"),
        ({"grammar": "start: x"}, "grammar cannot be compiled: .*unknown name"),
        ({"grammar": "start: start"}, "grammar"),
        ({"grammar": 'start: ""'}, "grammar allows no text"),
        ({"grammar": "start ::= nonsense {"}, "grammar is not GBNF"),
        ({"grammar": 'start: "a"{1,1000000}'}, "grammar repeats"),
        ({"json": {"type": "strin"}}, "json cannot be compiled: Invalid type"),
        ({"json": {"not": {"type": "string"}}}, "json.not cannot be enforced; leave it out"),
        ({"json": {"$ref": "#/$defs/x"}}, "json cannot be compiled"),
        ({"json": {"$ref": "http://host/schema"}}, "json.\\$ref names another document"),
        ({"json": {"$ref": "#"}}, "is the schema itself"),
        (
            {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
            "json cannot be compiled: Unsatisfiable",
        ),
        ({"json": {"type": "string", "pattern": "(a"}}, "json cannot be compiled"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused(
    outputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as error:
        SMALL.compile(StructuredOutputs(**outputs))
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)


def nested(depth: int) -> dict[str, Any]:
    return {"oneOf": [nested(depth - 1), {"type": "null"}]} if depth else {"type": "boolean"}


@pytest.mark.parametrize(
    "outputs",
    [
        {"regex": "((a{1,1000}){1,1000}){1,1000}b"},
        {"regex": "(a+)+b"},
        {"regex": "(a|aa)*.{2000}b"},
        {"json": nested(12)},
        {"json": {"enum": [str(i) * 3 for i in range(8000)]}},
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 100000}},
        {
            "json": {
                "type": "object",
                "properties": {
                    f"p{i}": {"type": "string", "pattern": "^[ab]{1,50}$"} for i in range(1000)
                },
            }
        },
        {
            "grammar": "start: r0\n"
            + "\n".join(f"r{i}: " + f"r{i + 1} " * 10 for i in range(6))
            + '\nr6: "a"'
        },
        {"grammar": "start: start | start start"},
        {"choice": [f"name {i}" for i in range(1024)]},
    ],
)
def test_a_hostile_grammar_is_compiled_or_refused(outputs: dict[str, Any]) -> None:
    try:
        state = SMALL.compile(StructuredOutputs(**outputs))
        for _ in range(20):
            state.advance(allowed(state, VOCAB)[0])
    except (RequestError, ConstraintError, IndexError):
        pass  # the end of a text


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), field=st.sampled_from(["regex", "grammar", "json"]))
def test_any_text_is_compiled_or_refused(text: str, field: str) -> None:
    try:
        assert allowed(SMALL.compile(StructuredOutputs(**{field: text})), VOCAB)  # type: ignore[arg-type]
    except RequestError as error:
        assert field in str(error)


def test_control_tokens_and_end_tokens_are_not_text() -> None:
    state = SMALL.compile(StructuredOutputs(regex='(ab|[{]")+'))
    found = allowed(state, VOCAB)
    assert found and not set(EOS) & set(found)


def test_the_cache_keeps_the_latest_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.grammar.grammars._MAX_COMPILED", 2)
    grammars = Grammars(JsonVocabulary(), VOCAB)
    for text in ("a", "b", "a", "c"):
        grammars.compile(StructuredOutputs(regex=text))
    assert [text for _, text, _ in grammars._compiled] == ["a", "c"]


def test_a_grammar_is_compiled_again_after_its_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.grammar.grammars._MAX_USES", 2)
    grammars, found = Grammars(JsonVocabulary(), VOCAB), []
    for _ in range(4):
        grammars.compile(StructuredOutputs(regex="a"))
        found.append(grammars._compiled["regex", "a", ""][1])
    assert found[0] is found[1] and found[2] is found[3] and found[1] is not found[2]


def test_without_llguidance_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install headrace\[structured\]"):
        Grammars(JsonVocabulary(), VOCAB).compile(StructuredOutputs(regex="a"))


def test_a_model_without_text_is_refused() -> None:
    vocabulary = JsonVocabulary()
    vocabulary.pieces = []
    with pytest.raises(RequestError, match="needs a tokenizer"):
        Grammars(vocabulary, VOCAB).compile(StructuredOutputs(regex="a"))
