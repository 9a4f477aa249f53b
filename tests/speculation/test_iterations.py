"""Jacobi chains and the lookahead window, on logits with given likeliest tokens."""

import numpy as np
import pytest

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.speculation.proposers.jacobi import JacobiProposer
from headrace.speculation.proposers.lookahead import LookaheadProposer, _State
from tests.speculation.views import View

VOCAB = 100


def rows(likeliest: list[int]) -> StepResult:
    logits = np.zeros((len(likeliest), VOCAB), np.float32)
    logits[np.arange(len(likeliest)), likeliest] = 1
    return StepResult([], logits)


class TestJacobi:
    def test_rows_after_the_first_wrong_draft_are_the_next_draft(self) -> None:
        proposer, view = JacobiProposer(16), View([1, 2, 3])
        (draft,) = proposer.propose([view], [4])
        assert draft == DraftTree([1, 2, 3], [-1, 0, 1])  # the sequence has no more tokens
        view.known += [1, 9]  # the first draft was right
        #   rows of another sequence    last   1   2   3
        said = rows([50, 51, 52, 53, 54, 1, 9, 30, 31])
        proposer.observe([View([0]), view], [Commit(1, [0], [1, 9], [], row=5, draft=draft)], said)
        assert proposer.propose([view], [2])[0] == DraftTree([30, 31], [-1, 0])

    def test_a_step_without_draft_rows_starts_over(self) -> None:
        proposer, view = JacobiProposer(16), View([1, 2, 3])
        proposer.observe([view], [Commit(0, [], [3], [], row=0, draft=NO_DRAFT)], rows([3]))
        assert proposer.propose([view], [2])[0].tokens == [1, 2]

    def test_fewer_rows_than_proposed_give_a_shorter_chain(self) -> None:
        proposer, view = JacobiProposer(16), View([1, 2, 3, 4, 5])
        (draft,) = proposer.propose([view], [4])
        run = DraftTree(draft.tokens[:2], draft.parents[:2])
        proposer.observe([view], [Commit(0, [], [5], [], row=0, draft=run)], rows([5, 60, 61, 77]))
        assert proposer.propose([view], [3])[0].tokens == [
            60,
            61,
            1,
        ]  # 77 is after a row of another sequence

    def test_converges_to_plain_decoding(self) -> None:
        """The next token depends on the previous token at every third position, and otherwise only
        on the position.
        """

        def follow(first: int, tokens: list[int]) -> list[int]:
            return [
                position if position % 3 else (7 * token + 3) % 31
                for position, token in enumerate(tokens, first)
            ]

        proposer, view = JacobiProposer(16), View([0, 5])
        steps = 0
        while len(view.known) < 60:
            (draft,) = proposer.propose([view], [6])
            said = follow(len(view.known), [view.known[-1], *draft.tokens])
            path: list[int] = []
            while len(path) < len(draft.tokens) and draft.tokens[len(path)] == said[len(path)]:
                path.append(len(path))
            view.known += said[: len(path) + 1]
            proposer.observe(
                [view], [Commit(0, path, said[: len(path) + 1], [], row=0, draft=draft)], rows(said)
            )
            steps += 1
        assert view.known[2:] == follow(2, view.known[1:-1])
        assert steps < 40


class TestLookahead:
    def test_the_lookahead_window_is_a_tree(self) -> None:
        (draft,) = LookaheadProposer(16).propose([View([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])], [16])
        assert draft.indivisible
        #               five columns of two levels: a stem, and a leaf on each of its nodes
        assert draft.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
        assert draft.parents == [-1, 0, 0, 2, 2, 4, 4, 6, 6, 8]

    def test_columns_become_ngrams_and_the_window_moves_forward(self) -> None:
        proposer, view = LookaheadProposer(16), View([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
        (draft,) = proposer.propose([view], [16])
        view.known += [7]
        said = rows([7, 0, 42, 0, 44, 0, 46, 0, 48, 0, 50])  # after columns (1, 2), (3, 4), ...
        proposer.observe([view], [Commit(0, [], [7], [], row=0, draft=draft)], said)
        (draft,) = proposer.propose([view], [16])
        assert draft.tokens[:10] == [
            2,
            42,
            4,
            44,
            6,
            46,
            8,
            48,
            10,
            50,
        ]  # columns are (2, 42), (4, 44), ... now
        assert (draft.tokens[10:], draft.parents[10:]) == (
            [8, 48],
            [-1, 10],
        )  # the n-gram that followed 7

    def test_accepted_tokens_move_the_window_further(self) -> None:
        proposer, view = LookaheadProposer(16), View([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
        (draft,) = proposer.propose([view], [16])
        said = rows([1, 3, 42, 77, 44, 0, 46, 0, 48, 0, 50])
        view.known += [1, 3, 77]
        proposer.observe([view], [Commit(0, [0, 2], [1, 3, 77], [], row=0, draft=draft)], said)
        (draft,) = proposer.propose([view], [16])
        assert draft.tokens[:6] == [6, 46, 8, 48, 10, 50]

    def test_every_budget_gives_a_valid_tree(self) -> None:
        for budget in range(1, 40):
            view = View([1, 2, 3])
            (draft,) = LookaheadProposer(16).propose([view], [budget])
            assert len(draft.tokens) <= budget and all(
                parent < node for node, parent in enumerate(draft.parents)
            )
            # Of two rows each: the first column always, and as many more as leave two for an
            # n-gram.
            assert len(draft.tokens) == (2 * min(5, max(1, (budget - 2) // 2)) if budget > 1 else 0)

    def test_a_step_without_new_tokens_leaves_the_window(self) -> None:
        proposer, views = LookaheadProposer(16), [View([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), View([3])]
        before = proposer.propose(views, [16, 1])
        proposer.observe(
            views, [Commit(0, [], [], []), Commit(1, [], [4], [])], rows([])
        )  # the second has not drafted yet
        assert proposer.propose(views, [16, 1]) == before

    def test_the_latest_three_ngrams_of_a_token_are_kept(self) -> None:
        state = _State([7])
        for rest in ((20, 30), (21, 31), (20, 30), (22, 32), (20, 30), (23, 33)):
            state._remember(7, rest)
        assert state.draft([7], 30).tokens[-6:] == [23, 33, 20, 30, 22, 32]

    def test_memory_is_bounded_and_the_latest_ngrams_are_kept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("headrace.speculation.proposers.lookahead._MAX_FIRST_TOKENS", 2)
        state = _State([7])
        for first in (1, 2, 1, 3):
            state._remember(first, (first + 10, first + 20))
        assert state._pool == {1: [(11, 21)], 3: [(13, 23)]}
