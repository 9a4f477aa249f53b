"""The suffix tree proposer: drafts equal those of plain searches, and memory is bounded."""

import gc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace._native import SuffixTree, suffix_draft
from headrace.batch import NO_DRAFT, DraftTree
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers.suffix import SuffixProposer
from tests.engine.toy import toy_engine
from tests.speculation.suffix_twin import Corpus, twin_draft
from tests.speculation.views import View
from tests.tiny import run_all

TEXT = st.lists(st.integers(0, 2), max_size=40)
OPTIONS: dict[str, Any] = {
    "max_nodes": st.integers(1, 20),
    "max_width": st.integers(1, 3),
    "min_length": st.integers(1, 4),
    "min_value": st.sampled_from([0.0, 0.1, 0.5]),
}


@settings(max_examples=150, deadline=None)
@given(
    local=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    steps=st.lists(st.integers(1, 9), max_size=6),
    outputs=st.lists(st.tuples(TEXT, TEXT), max_size=5),
    removed=st.sets(st.integers(0, 4)),
    skipped=st.integers(-1, 4),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_drafts_are_those_of_plain_searches(
    local: list[int],
    steps: list[int],
    outputs: list[tuple[list[int], list[int]]],
    removed: set[int],
    skipped: int,
    options: dict[str, Any],
) -> None:
    """This holds if texts grow in turns, and after texts have left."""
    own, tree, corpus = SuffixTree(), SuffixTree(), Corpus()
    own.begin([])
    start = 0
    for step in [*steps, len(local)]:
        own.append(0, local[start : start + step])
        start += step
    texts = [tree.begin(context) for context, _ in outputs]
    for half in (slice(0, 5), slice(5, None)):
        for text, (_, tokens) in zip(texts, outputs, strict=True):
            tree.append(text, tokens[half])
    for text, (context, tokens) in enumerate(outputs):
        if text in removed:
            tree.remove(text)
        else:
            corpus.texts[text] = len(context), [*context, *tokens]

    made = suffix_draft(own, 0, tree, skipped, **options)
    assert made == twin_draft(local, corpus, skipped, **options)
    assert suffix_draft(own, 0, None, -1, **options) == twin_draft(local, None, -1, **options)


def test_the_numbers_of_removed_texts_are_used_again() -> None:
    tree = SuffixTree()
    first, second = tree.begin([1]), tree.begin([])
    tree.append(first, [2, 3])
    tree.append(second, [4, 5])
    assert tree.num_places == 3  # the first token of a text without context has no place
    tree.remove(first)
    assert tree.num_places == 1
    assert tree.begin([]) == first
    for absent in (-1, 7):
        with pytest.raises(IndexError, match="no such text"):
            tree.append(absent, [1])


@pytest.mark.parametrize("wrong", [{"max_nodes": -1}, {"max_width": 0}, {"min_length": 0}])
def test_options_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    options = {"max_nodes": 4, "max_width": 1, "min_length": 1} | wrong
    (name,) = wrong
    tree = SuffixTree()
    with pytest.raises(ValueError, match=f"{name} must be"):
        suffix_draft(tree, tree.begin([]), None, -1, min_value=0.1, **options)


def draft(known: list[int], budget: int = 8) -> DraftTree:
    (found,) = SuffixProposer(16).propose([View(known)], [budget])
    return found


def taught(*sequences: list[int], **options: Any) -> SuffixProposer:
    """A proposer that has learned these outputs."""
    proposer = SuffixProposer(16, **options)
    for tokens in sequences:
        proposer.propose([View(tokens)], [1])
    return proposer


def test_the_longest_match_is_continued() -> None:
    #      a longer match       a later, shorter one
    known = [1, 2, 3, 4, 50, 60, 9, 3, 4, 70, 80, 1, 2, 3, 4]
    assert draft(known, 4).tokens == [50, 60, 9, 3]


def test_there_is_no_draft_without_a_match() -> None:
    assert draft([1, 2, 3, 4, 5]) == NO_DRAFT
    assert draft([7]) == NO_DRAFT


def test_a_repetition_is_continued() -> None:
    assert draft([1, 2] * 4, 5)[:2] == ([1, 2, 1, 2, 1], [-1, 0, 1, 2, 3])


def test_frequent_continuations_come_first_and_rare_ones_are_left_out() -> None:
    outputs = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9]]
    (found,) = taught(*outputs).propose([View([0, 1, 2, 3, 4])], [8])
    assert found[:2] == ([5, 6, 7, 9, 8], [-1, 0, -1, 0, 2])


def test_drafts_are_deeper_after_longer_matches() -> None:
    text = list(range(100, 140))
    for length in (1, 2, 3, 5):
        assert len(draft([*text, 1, *text[:length]], 40).tokens) == 8 + 2 * length


def test_own_text_outvotes_other_texts() -> None:
    proposer = taught(*[[1, 2, 3, 4]] * 8)
    (found,) = proposer.propose([View([1, 2, 5, 1, 2])], [9])
    assert (found.tokens[0], found.confidence) == (5, 3)


def test_confidence_rises_with_match_agreement_and_own_text() -> None:
    text = list(range(100, 140))
    for length, confidence in ((1, 11), (2, 13), (3, 13), (4, 15), (8, 17), (16, 19), (20, 19)):
        assert draft([*text, 1, *text[:length]]).confidence == confidence
    (found,) = taught([1, 2, 3, 4]).propose([View([1, 2])], [9])
    assert found.confidence == 12  # as sure, in another text
    assert draft([1, 2, 3, 1, 2, 4, 1, 2]).confidence == 3  # two continuations


def test_outputs_are_learned_as_they_grow_and_when_they_end() -> None:
    proposer, view = SuffixProposer(16), View([1, 2, 3, 4])
    assert proposer.propose([view, View([2, 3])], [4, 4])[1].tokens == [4]
    view.known += [5, 6]
    proposer.propose([view], [1])
    view.known += [7, 8]
    assert proposer.propose([View([5, 6])], [4]) == [NO_DRAFT]  # no call since
    del view
    gc.collect()
    assert not proposer._transcripts
    assert proposer.propose([View([5, 6])], [4])[0].tokens == [7, 8]


def test_prompts_are_not_shared() -> None:
    proposer = SuffixProposer(16)
    proposer.propose([View([1, 2, 3, 4], prompt_len=4)], [4])
    assert proposer.propose([View([1, 2])], [4]) == [NO_DRAFT]


def test_drafts_do_not_cross_scopes() -> None:
    proposer = SuffixProposer(16)
    proposer.propose([View([1, 2, 3, 4], scope="a")], [4])
    assert proposer.propose([View([1, 2], scope="b"), View([1, 2], scope="a")], [4, 4]) == [
        NO_DRAFT,
        DraftTree([3, 4], [-1, 0], 12),
    ]


def test_memory_of_outputs_is_bounded_and_the_oldest_leave() -> None:
    proposer = SuffixProposer(16, max_corpus_tokens=60)
    long = View([1, 2])
    for start in range(10, 1000, 5):
        long.known += [start]
        output = View(list(range(start, start + 5)), scope=str(start % 2))
        proposer.propose([output, long], [1, 1])
        corpus = proposer._corpus
        assert corpus._num_tokens <= 60
        assert sum(tree.num_places for tree in corpus._trees.values()) <= 60
    found = [
        bool(
            proposer.propose([View([start, start + 1], prompt_len=2, scope=str(start % 2))], [1])[
                0
            ].tokens
        )
        for start in range(10, 1000, 5)
    ]
    assert found[-8:] == [True] * 8 and not any(found[:-15])
    assert sum(tree.num_bytes for tree in corpus._trees.values()) < 60 * 56 + 20 * 200


def test_acceptance_rises_over_a_repeated_workload() -> None:
    engine = toy_engine(proposer=SuffixProposer(16))
    requests = [([token, 3, 4], SamplingParams(temperature=0, max_tokens=30)) for token in range(8)]
    steps, texts = [], []
    for _ in range(3):
        before = engine.stats().steps
        texts.append([result.outputs[0].token_ids for result in run_all(engine, requests)])
        steps.append(engine.stats().steps - before)
    assert texts[0] == texts[1] == texts[2]
    assert steps[0] > 2 * steps[1] >= 2 * steps[2]
    drafts = engine.stats().drafts["test"]
    assert drafts.accepted > 300 and engine.stats().proposer_failures == 0
