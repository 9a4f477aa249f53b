"""Models that draft: a draft is the model's own continuation, and few tokens are computed twice."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.batch import NO_DRAFT, DraftTree, RaggedBatch
from headrace.config import EngineConfig
from headrace.kv.manager import KvManager, Tables
from headrace.kv.rows import TokenRun, batch_of_runs
from headrace.logit_ops import Done, LogitOp
from headrace.sampling.sampler import make_sampler
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers import DraftModel, DraftModels, make_proposers
from headrace.speculation.proposers.draft_model import DraftModelProposer, max_rows
from headrace.speculation.proposers.self_draft import SelfDraftProposer
from tests.engine.toy import FULL, VOCAB, ToyExecutable, plain_decoding, toy_kv, toy_logits
from tests.speculation.views import View

SIZE = 4
GREEDY = SamplingParams(temperature=0)
TOKENS = st.integers(0, VOCAB - 1)


@dataclass(eq=False)
class Drafted(View):
    """A sequence as a drafting model sees it."""

    sampler: Any = None
    computed: int = 0
    tables: Tables = ()
    constraint: Any = None


def sequence(
    known: list[int], params: SamplingParams = GREEDY, seq_id: tuple[int, int] = (0, 0)
) -> Drafted:
    sampler = make_sampler(params, known, VOCAB, params.seed or 0, ())
    return Drafted(list(known), seq_id, len(known), sampler=sampler.clone(seq_id[1]))


class Counting(ToyExecutable):
    """Records the rows of each sequence in each launch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SIZE, **options)
        self.rows: list[list[int]] = []

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> Done:
        self.rows.append(np.diff(batch.row_start).tolist())
        return super().launch(batch, ops, logits=logits, hidden=hidden)

    def take_rows(self) -> list[list[int]]:
        rows, self.rows = self.rows, []
        return rows


def draft_model(
    num_blocks: int = 64, max_length: int = 1000, windows: tuple[int, ...] = FULL, **config: Any
) -> DraftModelProposer:
    """A proposer with the toy model as draft model."""
    options = EngineConfig(proposer="draft_model", **config)
    kv = toy_kv(num_blocks, SIZE, windows, max_rows(options.draft_depth * options.draft_width))
    (proposer,) = make_proposers(
        options, DraftModels(draft=DraftModel(Counting(windows=windows), kv, max_length))
    ).values()
    assert isinstance(proposer, DraftModelProposer)
    return proposer


def propose(
    proposer: DraftModelProposer | SelfDraftProposer, seqs: list[Any], budgets: list[int]
) -> list[DraftTree]:
    """Drafts without the confidence of their nodes."""
    return [draft._replace(confidence=0) for draft in proposer.propose(seqs, budgets)]


def rows_of(proposer: DraftModelProposer | SelfDraftProposer) -> list[list[int]]:
    """Rows of each sequence in each launch since the last call."""
    assert isinstance(proposer._executable, Counting)
    return proposer._executable.take_rows()


def continuation(known: list[int], length: int) -> DraftTree:
    """A chain of the likeliest tokens."""
    tokens: list[int] = []
    for _ in range(length):
        tokens.append(int(toy_logits([*known, *tokens]).argmax()))
    return DraftTree(tokens, list(range(-1, length - 1)))


def paths(draft: DraftTree) -> list[list[int]]:
    """The tokens down to each node."""
    found: list[list[int]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append([*found[parent], token] if parent >= 0 else [token])
    return found


def check(proposer: DraftModelProposer) -> None:
    """Assert that the draft model's blocks add up and hold the tokens that it recorded."""
    executable = proposer._executable
    assert isinstance(executable, ToyExecutable)
    proposer.kv.check([draft.tables for draft in proposer._contexts.values()])
    for draft in proposer._contexts.values():
        executable.check(proposer.kv, draft.tables, draft.tokens)


@given(
    prompts=st.lists(st.lists(TOKENS, min_size=1, max_size=9), min_size=1, max_size=3),
    depth=st.integers(1, 4),
    windows=st.sampled_from([(0,), (5,), (0, 3)]),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_drafts_are_the_models_own_continuation(
    prompts: list[list[int]], depth: int, windows: tuple[int, ...], data: st.DataObject
) -> None:
    """This holds for any accepted part, any growth of the sequences, and any subset of them."""
    proposer = draft_model(200, windows=windows, draft_depth=depth)
    seqs = [sequence(prompt, seq_id=(request, 0)) for request, prompt in enumerate(prompts)]
    for _ in range(4):
        budgets = [data.draw(st.integers(0, depth)) for _ in seqs]
        drafts = propose(proposer, seqs, budgets)
        check(proposer)
        assert drafts == [
            continuation(seq.known, budget) for seq, budget in zip(seqs, budgets, strict=True)
        ]
        for i, draft in enumerate(drafts):
            path = draft.tokens
            seqs[i].known += path[: data.draw(st.integers(0, len(path)))] + data.draw(
                st.lists(TOKENS, min_size=1, max_size=3)
            )
        if len(seqs) > 1 and data.draw(st.booleans()):
            del seqs[0]
            gc.collect()
    seqs.clear()
    gc.collect()
    assert all(pool.num_free == pool.num_blocks for pool in proposer.kv.pools)


def test_only_new_tokens_are_computed() -> None:
    proposer = draft_model(draft_depth=3)
    seq, other = sequence([1, 2, 3, 4, 5]), sequence([6, 7], seq_id=(1, 0))
    (draft, _) = propose(proposer, [seq, other], [3, 1])
    assert rows_of(proposer) == [[5, 2], [1], [1]]
    seq.known += [*draft.tokens, 0]  # the last of a draft has no KV
    (draft,) = propose(proposer, [seq], [2])
    assert rows_of(proposer) == [[2], [1]]
    seq.known += [(draft.tokens[0] + 1) % VOCAB]
    (draft,) = propose(proposer, [seq], [3])
    assert rows_of(proposer) == [[1], [1], [1]]
    seq.known += [draft.tokens[0], (draft.tokens[1] + 1) % VOCAB, 0]
    assert propose(proposer, [seq, other], [0, 0]) == [NO_DRAFT, NO_DRAFT]
    assert rows_of(proposer) == []
    propose(proposer, [seq], [1])
    assert rows_of(proposer) == [[2]]


def test_catching_up_with_a_long_prompt_takes_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.speculation.proposers.draft_model._CATCH_UP_ROWS", 8)
    assert max_rows(3) == 10  # and two of its own drafts
    proposer = draft_model(draft_depth=3)
    seqs = [sequence(list(range(12)), seq_id=(0, 0)), sequence([1, 2, 3, 4, 5, 6], seq_id=(1, 0))]
    expected = [continuation(seq.known, 3) for seq in seqs]
    for rows, drafts in (
        ([[8]], [NO_DRAFT, NO_DRAFT]),
        (
            [[4], [4], [1], [1]],
            [expected[0], NO_DRAFT],
        ),  # the first draws, then the second has what is left of 8
        ([[1, 2], [1, 1], [1, 1]], expected),
    ):
        assert propose(proposer, seqs, [3, 3]) == drafts
        assert rows_of(proposer) == rows
        check(proposer)


def test_siblings_share_the_longest_common_prefix() -> None:
    proposer = draft_model(draft_depth=2)
    first, second = (sequence(list(range(10)), seq_id=(0, i)) for i in range(2))
    assert propose(proposer, [first, second], [2, 2]) == [continuation(first.known, 2), NO_DRAFT]
    assert rows_of(proposer) == [[10], [1]]
    first.known += [1]
    second.known += [2]
    assert propose(proposer, [first, second], [2, 2]) == [
        continuation(seq.known, 2) for seq in (first, second)
    ]
    assert rows_of(proposer) == [[1, 1], [1, 1]]
    assert proposer.kv.num_available == 64 - 4  # two blocks are shared, and each has one of its own
    third = sequence([*second.known, 9], seq_id=(0, 2))
    propose(proposer, [third], [1])
    assert rows_of(proposer) == [[1]]  # of the second it has all but its last token
    check(proposer)


def test_a_sibling_whose_window_has_freed_kv_starts_over() -> None:
    proposer = draft_model(windows=(3,), draft_depth=1)
    first, second = sequence(list(range(10))), sequence([*range(10), 2], seq_id=(0, 1))
    for _ in range(3):
        assert propose(proposer, [first], [1]) == [continuation(first.known, 1)]
        first.known += [1, 2, 3, 4, 5, 6]
    rows_of(proposer)
    assert propose(proposer, [second], [1]) == [continuation(second.known, 1)]
    assert rows_of(proposer) == [[11]]  # the first sees nothing of the first twelve tokens any more
    check(proposer)


def test_blocks_come_from_sequences_that_do_not_draft_now() -> None:
    proposer = draft_model(num_blocks=3, draft_depth=2)
    seqs = [sequence([i, 2, 3, 4, 5, 6], seq_id=(i, 0)) for i in range(2)]
    expected = [continuation(seq.known, 2) for seq in seqs]
    short = sequence([9], seq_id=(2, 0))
    assert propose(proposer, [*seqs, short], [2, 2, 2]) == [
        expected[0],
        NO_DRAFT,
        continuation([9], 2),
    ]
    assert propose(proposer, seqs[1:], [2]) == expected[1:]
    check(proposer)
    rows_of(proposer)
    assert propose(proposer, seqs[:1], [2]) == expected[:1]
    assert rows_of(proposer) == [[6], [1]]
    check(proposer)


def test_no_draft_exceeds_the_length_that_the_draft_was_trained_for() -> None:
    for width in (1, 2):
        proposer = draft_model(max_length=12, draft_depth=3, draft_width=width)
        for length, depth in ((9, 3), (10, 2), (11, 1), (12, 0), (13, 0)):
            seq = sequence(list(range(length)), seq_id=(length, 0))
            (draft,) = propose(proposer, [seq], [3 * width])
            assert len(draft.tokens) == depth * width
            assert max(map(len, paths(draft)), default=0) <= depth
            if width == 1:
                assert draft == continuation(seq.known, depth)


@pytest.mark.parametrize("method", ["exact", "rejection"])
def test_it_samples_with_the_noise_of_the_sequence(method: Any) -> None:
    params = SamplingParams(temperature=0.8, seed=3)
    proposer = draft_model(draft_depth=4, acceptance_method=method)
    for index in range(3):
        seq = sequence([5, 6, 7], params, (index, index))
        for _ in range(2):  # its own sampler stays as it is
            (draft,) = propose(proposer, [seq], [4])
            texts = [[*seq.known, *draft.tokens[:i]] for i in range(4)]
            assert [*texts[3], draft.tokens[3]] == plain_decoding(seq.known, params, index, 7)
            if method == "exact":
                assert draft.probabilities is None
            else:
                assert draft.probabilities is not None
                assert draft.probabilities.tolist() == [
                    seq.sampler.probabilities(toy_logits(text), len(text)).tolist()
                    for text in texts
                ]


def self_draft(
    windows: tuple[int, ...] = FULL, **config: Any
) -> tuple[SelfDraftProposer, KvManager]:
    """A proposer with the toy model as first layers, and the KV that they share."""
    executable = Counting(windows=windows)
    (made,) = make_proposers(
        EngineConfig(proposer="self_draft", **config),
        DraftModels(self_draft=executable, block_size=SIZE),
    ).values()
    assert isinstance(made, SelfDraftProposer)
    return made, toy_kv(40, SIZE, windows)


def compute(
    proposer: SelfDraftProposer, kv: KvManager, seq: Drafted, computed: int, drafts: int
) -> None:
    """Give the sequence KV of `length` tokens, and blocks for the rest and some drafts."""
    seq.tables, seq.computed = kv.new_tables(), computed
    assert kv.allocate(seq.tables, 0, len(seq.known) + drafts) == []
    proposer._executable.launch(
        batch_of_runs([TokenRun(seq.known[:computed], 0, seq.tables)], SIZE, logits=False)
    )
    rows_of(proposer)


@pytest.mark.parametrize("windows", [(0,), (5, 0)])
def test_first_layers_continue_from_the_kv_of_the_model(windows: tuple[int, ...]) -> None:
    proposer, kv = self_draft(windows, draft_depth=3)
    lengths = [
        (6, 5),
        (20, 4),
        (21, 4),
        (30, 29),
    ]  # of which so many are computed: more than 16 to come are too many
    seqs = [
        sequence([t % VOCAB for t in range(i, i + length)], seq_id=(i, 0))
        for i, (length, _) in enumerate(lengths)
    ]
    for seq, (_, computed) in zip(seqs, lengths, strict=True):
        compute(proposer, kv, seq, computed, 3)
    budgets = [3, 1, 3, 0]
    expected = [continuation(seq.known, nodes) for seq, nodes in zip(seqs, budgets, strict=True)]
    expected[2] = NO_DRAFT
    assert propose(proposer, seqs, budgets) == expected
    assert rows_of(proposer) == [[1, 16], [1], [1]]


@pytest.mark.parametrize("method", ["exact", "rejection"])
def test_first_layers_sample_with_the_noise_of_the_sequence(method: Any) -> None:
    params = SamplingParams(temperature=0.8, seed=3)
    proposer, kv = self_draft(draft_depth=3, acceptance_method=method)
    seq = sequence([5, 6, 7], params, (0, 2))
    compute(proposer, kv, seq, 2, 3)
    (draft,) = propose(proposer, [seq], [3])
    assert [*seq.known, *draft.tokens] == plain_decoding(seq.known, params, 2, 6)
    assert (draft.probabilities is None) == (method == "exact")


def test_logits_that_are_not_finite_end_a_draft_and_no_other() -> None:
    kv = toy_kv(20, SIZE)
    bad = continuation([1, 2, 3], 3).tokens[1]
    proposer = DraftModelProposer(
        ToyExecutable(SIZE, broken=bad), kv, 100, 3, 1, probabilities=False
    )
    other = next(
        [4, token]
        for token in range(VOCAB)
        if bad not in (token, *continuation([4, token], 3).tokens)
    )
    seqs = [sequence([1, 2, 3]), sequence([bad], seq_id=(1, 0)), sequence(other, seq_id=(2, 0))]
    first = continuation([1, 2, 3], 2)
    assert propose(proposer, seqs, [3, 3, 3]) == [first, NO_DRAFT, continuation(other, 3)]
