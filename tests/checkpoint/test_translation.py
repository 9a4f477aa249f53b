"""Texts in the tokens of two vocabularies: the same bytes, however a token cuts them."""

import json
from functools import cache
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checkpoint.tokenizer_gguf import tokenizer_from_gguf
from headrace.checkpoint.translation import LOOKBEHIND, Translator
from tests.checkpoint.conftest import SPECIAL, byte_alphabet, metadata
from tests.tokenizer_parity import DATA, ChangedMetadata, _values

KINDS = ["byte-level", "bpe", "bpe-no-prefix", "unigram-plain", "unigram"]
"""`unigram` has no bytes, and replaces characters before it splits a text."""
EXACT = KINDS[:3]
"""Kinds that spell any bytes."""
PAIRS = list(permutations(KINDS, 2))
WORDS = [
    "the mill",
    " water",
    "\n\n",
    "  ",
    "Ω",
    "naïve",
    "日本語",
    "👩‍👧",
    "\x00",
    "12 34",
    "a",
    "\t",
    "€",
]
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=6)), max_size=20).map("".join)


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "byte-level":
        merges = json.loads((DATA / "tokenizers.json").read_text())["byte_level"]["merges"]
        own = metadata("llama")
        made = ["".join(merge.split(" ")) for merge in merges]
        tokens = [*SPECIAL, *byte_alphabet(), *dict.fromkeys(made)]
        changes = {
            "tokens": tokens,
            "token_type": np.repeat([3, 1], [len(SPECIAL), len(tokens) - len(SPECIAL)]),
            "merges": merges,
        }
        own |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        return tokenizer_from_gguf(ChangedMetadata(own))
    if kind == "tiny byte-level":
        own = metadata("llama")
        types = np.array(own["tokenizer.ggml.token_type"])
        return tokenizer_from_gguf(ChangedMetadata(own | {"tokenizer.ggml.token_type": types}))
    return tokenizer_from_gguf(ChangedMetadata(_values(kind)))


@cache
def translator(target: str, draft: str) -> Translator:
    one, other = tokenizer(target), tokenizer(draft)
    return Translator(one, other, one.vocab_size, other.vocab_size)


def spelt(own: Tokenizer, ids: list[int]) -> bytes:
    """The bytes of the text of some tokens."""
    data = b"".join(own.token_bytes(token) for token in ids if token not in own.special_ids)
    return data.removeprefix(b" ") if own.vocabulary.strip_space else data


@settings(max_examples=150, deadline=None)
@given(
    pair=st.sampled_from([pair for pair in PAIRS if pair[0] in EXACT]),
    text=TEXTS,
    chunks=st.lists(st.integers(1, 9), min_size=1),
)
def test_the_draft_reads_the_bytes_of_the_text(
    pair: tuple[str, str], text: str, chunks: list[int]
) -> None:
    """However many tokens come at once, and wherever they end."""
    target, draft = map(tokenizer, pair)
    known = target.encode(text, add_special=False, parse_special=False)
    read, before, step = translator(*pair).new_text(), list[int](), 0
    while read.num_read < len(known):
        end = min(len(known), read.num_read + chunks[step % len(chunks)])
        read.read(known[:end])
        step += 1

        kept = max(0, len(before) - LOOKBEHIND)
        assert read.ids[:kept] == before[:kept]
        before = read.ids[:]
        own = read.ids[len(draft.prefix_ids) :]
        if pair[1] in EXACT:
            assert read.is_whole
            assert spelt(draft, own) == spelt(target, known[:end])
        assert all(0 <= token < draft.vocab_size for token in read.ids)


@settings(max_examples=150, deadline=None)
@given(pair=st.sampled_from(PAIRS), before=TEXTS, after=TEXTS, data=st.data())
def test_a_draft_is_cut_into_tokens_with_the_same_bytes(
    pair: tuple[str, str], before: str, after: str, data: st.DataObject
) -> None:
    target, draft = map(tokenizer, pair)
    known = target.encode(before, add_special=False, parse_special=False)
    known = known[: data.draw(st.integers(0, len(known)))]  # perhaps inside a character
    read = translator(*pair).new_text()
    read.read(known)
    drafted = draft.encode(after, add_special=False, parse_special=False)
    drafted = drafted[: data.draw(st.integers(0, len(drafted)))]
    tokens = read.translated(drafted)

    assert all(0 <= token < target.vocab_size for token in tokens)
    assert not target.special_ids.intersection(tokens)
    made = b"".join(map(target.token_bytes, tokens))
    whole = b"".join(map(draft.token_bytes, drafted))
    begins = not spelt(target, known)  # either tokenizer may add a space to the start of a text
    if pair == ("byte-level", "bpe"):
        assert len(whole) - 3 - begins <= len(made) or not drafted
    starts = {made, made.removeprefix(b" ")} if begins else {made}
    assert whole.startswith(tuple(starts)) or (
        begins and whole.startswith(tuple(b" " + start for start in starts))
    )


@settings(max_examples=150, deadline=None)
@given(pair=st.sampled_from(PAIRS), data=st.data())
def test_any_tokens_are_read(pair: tuple[str, str], data: st.DataObject) -> None:
    """Control tokens, halves of characters and bytes that are no text do not raise."""
    target, draft = map(tokenizer, pair)
    tokens = st.lists(st.integers(0, target.vocab_size + 9), max_size=30)
    read = translator(*pair).new_text()
    known = list[int]()
    for more in data.draw(st.lists(tokens, min_size=1, max_size=4)):
        known += more
        read.read(known)
        drafted = data.draw(st.lists(st.integers(0, draft.vocab_size + 9), max_size=8))
        made = read.translated(drafted)
        assert all(0 <= token < draft.vocab_size for token in read.ids)
        assert all(0 <= token < target.vocab_size for token in made)


PROSE = (
    "The miller's wheel turned slowly, and the water ran through the channel into the mill.\n\n"
    "def add(a, b):\n    return a + b  # 12345 sums\n\nÜber die Mühle: naïve café, 日本語。\n" * 4
)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "unigram" not in pair], ids=str)
def test_a_text_is_cut_as_its_tokenizer_cuts_it(pair: tuple[str, str]) -> None:
    """Token by token and at once, although each step only looks at the last words."""
    target, draft = map(tokenizer, pair)
    known = target.encode(PROSE, add_special=False, parse_special=False)
    natural = draft.encode(PROSE, add_special=False, parse_special=False)
    natural = [*draft.prefix_ids, *natural]
    grown, whole = translator(*pair).new_text(), translator(*pair).new_text()
    for end in range(len(known) + 1):
        grown.read(known[:end])
    whole.read(known)
    assert whole.ids == natural
    assert grown.ids == natural


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "unigram" not in pair], ids=str)
def test_a_draft_is_cut_as_the_target_cuts_it(pair: tuple[str, str]) -> None:
    target = tokenizer(pair[0])
    known = target.encode(PROSE, add_special=False, parse_special=False)
    equal = 0
    for end in range(1, len(known) - 12, 5):
        read = translator(*pair).new_text()
        read.read(known[:end])
        following = target.decode(known[end : end + 12])
        if target.vocabulary.strip_space and target.token_bytes(known[end])[:1] == b" ":
            following = f" {following}"
        drafted = translator(*pair).draft.cut(b".", following.encode())
        made = read.translated([piece.token for piece in drafted])
        equal += made[:8] == known[end : end + 8]
    assert equal >= 0.9 * len(range(1, len(known) - 12, 5))


def test_text_that_looks_like_a_control_token_stays_text() -> None:
    target, draft = tokenizer("bpe"), tokenizer("byte-level")
    known = target.encode("a <|im_end|> b", add_special=False, parse_special=False)
    read = translator("bpe", "byte-level").new_text()
    read.read(known)
    assert not draft.special_ids.intersection(read.ids)


def test_control_tokens_are_translated_by_name_and_as_ends() -> None:
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    small, large = tokenizer("tiny byte-level"), tokenizer("byte-level")
    read = translator("tiny byte-level", "byte-level").new_text()
    read.read(small.encode(chat))
    assert read.ids == large.encode(chat)
    end = large.eos_id
    assert end is not None
    assert read.translated([*large.encode("he"), end, 5]) == [*small.encode("he"), small.eos_id]

    llama = tokenizer("bpe")  # its only end is </s>
    other = translator("bpe", "byte-level")
    text = other.new_text()
    assert llama.bos_id is not None and llama.eos_id is not None
    text.read([llama.bos_id, *llama.encode("Hi", add_special=False), llama.eos_id])
    assert text.ids == [*large.encode("Hi"), end]
    assert text.translated([end]) == [llama.eos_id]


def test_a_prompt_begins_as_the_draft_model_needs_it() -> None:
    target, draft = tokenizer("byte-level"), tokenizer("bpe")
    read = translator("byte-level", "bpe").new_text()
    read.read(target.encode("The mill"))
    assert read.ids == draft.encode("The mill")
    assert draft.prefix_ids and read.ids[: len(draft.prefix_ids)] == list(draft.prefix_ids)


def test_a_clone_goes_its_own_way() -> None:
    target = tokenizer("byte-level")
    first = translator("byte-level", "bpe").new_text()
    first.read(target.encode("The water"))
    second = first.clone()
    second.read(target.encode("The watermill turns"))
    assert first.ids == tokenizer("bpe").encode("The water")
    assert second.ids == tokenizer("bpe").encode("The watermill turns")


def test_ids_beyond_the_rows_of_a_model_are_left_out() -> None:
    target, draft = tokenizer("byte-level"), tokenizer("tiny byte-level")
    cut = Translator(target, draft, 300, draft.vocab_size - 5)
    read = cut.new_text()
    read.read(target.encode("hello"))
    assert b"".join(map(draft.token_bytes, read.ids)) == b"hello"
    assert max(read.ids) < draft.vocab_size - 5
    made = read.translated(draft.encode("hello hello"))
    assert b"".join(map(target.token_bytes, made)) == b"hello hello" and max(made) < 300


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_shared_tokens_have_the_same_bytes(pair: tuple[str, str]) -> None:
    target, draft = map(tokenizer, pair)
    shared = translator(*pair).shared_tokens()
    assert len(shared) == draft.vocab_size
    found = np.flatnonzero(shared >= 0)
    assert len(found) > 50 and len({*shared[found].tolist()}) == len(found)
    for own in found.tolist():
        token = int(shared[own])
        assert draft.token_bytes(own) == target.token_bytes(token) or token in target.special_ids
