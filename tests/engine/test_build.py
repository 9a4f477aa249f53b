"""The batch of a step, for examples made by hand."""

import numpy as np

from headrace.batch import DraftTree
from headrace.engine.build import build_batch
from headrace.engine.scheduled import ScheduledSequence
from headrace.kv.blocks import Table
from headrace.sampling_params import SamplingParams
from tests.engine.toy import toy_engine


def parts(drafts: list[DraftTree]) -> list[ScheduledSequence]:
    engine = toy_engine(block_size=4)
    for prompt in ([1, 2, 3, 4, 5], [6, 7]):
        engine.add_request(prompt, SamplingParams(prompt_logprobs=0 if len(prompt) > 2 else None))
    first, second = engine._scheduler.waiting
    first.computed, first.tables = 2, (Table([3, 9]),)
    second.tables = (Table([5, 6]),)
    return [
        ScheduledSequence(first, 3, True, draft=drafts[0]),
        ScheduledSequence(second, 1, False, draft=drafts[1]),
    ]


def test_a_batch_with_draft_chains() -> None:
    made = parts([DraftTree([11, 12], [-1, 0]), DraftTree([], [])])
    batch = build_batch(made, 4)
    (kv,) = batch.kv
    assert batch.tokens.tolist() == [3, 4, 5, 11, 12, 6]
    assert batch.positions.tolist() == [2, 3, 4, 5, 6, 0]
    assert kv.slots.tolist() == [14, 15, 36, 37, 38, 20]
    assert batch.row_start.tolist() == [0, 5, 6]
    assert (batch.context_len.tolist(), batch.scheduled_len.tolist()) == ([2, 0], [3, 1])
    assert kv.block_table.tolist() == [[3, 9], [5, 6]]
    assert batch.ancestors is None
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert batch.seq_of.tolist() == [0] * 5
    assert [item.first_score_row for item in made] == [0, 5]
    assert batch.token_source is None


def test_pending_tokens_come_from_the_last_launch() -> None:
    first, second = (item.seq for item in parts([DraftTree([], [])] * 2))
    first.computed, first.num_pending, first.last_op = 5, 1, 3
    batch = build_batch([ScheduledSequence(second, 2, True), ScheduledSequence(first, 1, True)], 4)
    assert (batch.tokens.tolist(), batch.positions.tolist()) == ([6, 7, 0], [0, 1, 5])
    assert batch.token_source is not None and batch.token_source.dtype == np.int32
    assert batch.token_source.tolist() == [-1, -1, 3]  # the fourth op drew the token after 5
    assert batch.kv[0].slots.tolist() == [20, 21, 37]


def test_a_batch_with_a_draft_tree() -> None:
    batch = build_batch(parts([DraftTree([11, 12, 13], [-1, -1, 0]), DraftTree([], [])]), 4)
    assert batch.positions.tolist() == [2, 3, 4, 5, 5, 6, 0]
    assert batch.kv[0].slots.tolist() == [14, 15, 36, 37, 38, 39, 20]
    assert batch.ancestors is not None
    assert batch.ancestors.tolist() == [[0], [0], [0], [0b1], [0b10], [0b101], [0]]


def test_a_draft_tree_with_more_nodes_than_a_word_has_bits() -> None:
    first, second = parts([DraftTree([1] * 130, [*range(-1, 128), 0]), DraftTree([], [])])
    first.seq.tables = (Table(range(40)),)
    batch = build_batch([second, first], 4)
    assert batch.ancestors is not None and batch.ancestors.shape == (1 + 3 + 130, 3)
    bits = [sum(int(word) << 64 * w for w, word in enumerate(row)) for row in batch.ancestors]
    assert bits[4 + 128] == 2**129 - 1
    assert bits[4 + 129] == 1 << 129 | 1
