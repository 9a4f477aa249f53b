"""Searches in sessions: their rules on a toy model, and the examples of the page."""

import re
from collections.abc import Iterator
from math import exp, inf
from pathlib import Path

import pytest

from headrace import SamplingParams
from headrace.errors import RequestError
from headrace.search import (
    best_of,
    choose,
    last_number,
    likelihood,
    majority,
    mcts,
    tree_of_thoughts,
)
from headrace.search.mcts import _TreeNode
from headrace.sessions.session import Node, Session
from tests.engine.toy import toy_engine
from tests.sessions.bare import BareHost

PARAMS = SamplingParams(temperature=1, max_tokens=3)
PAGE = Path(__file__).parents[2] / "docs/use/search.md"


@pytest.fixture
def session() -> Iterator[Session]:
    host = BareHost(toy_engine(num_blocks=100))
    with host.session([1, 2, 3], seed=1) as session:
        yield session
    assert host.engine.stats().kept_paths == 0


def low_tokens(nodes: list[Node]) -> list[float]:
    """A value that a test can recompute: low token ids are better, 0 to 1."""
    return [1 - sum(node.own_token_ids) / (23 * len(node.own_token_ids)) for node in nodes]


class TestBestOf:
    def test_the_best_stays_open(self, session: Session) -> None:
        best = best_of(session.root, 6, PARAMS, low_tokens)
        session.root.session.close()
        again = BareHost(toy_engine()).session([1, 2, 3], seed=1)
        children = again.root.sample(6, PARAMS)
        values = low_tokens(children)
        assert best.own_token_ids == children[values.index(max(values))].own_token_ids

    def test_only_the_best_stays_open(self, session: Session) -> None:
        best = best_of(session.root, 6, PARAMS, low_tokens)
        assert best.is_open and session.num_nodes == 2

    def test_likelihood_is_the_default(self, session: Session) -> None:
        best = best_of(session.root, 6, PARAMS)
        (score,) = session.root.score([best.own_token_ids])
        assert likelihood([best]) == [exp(score.mean)]

    def test_bad_values(self, session: Session) -> None:
        with pytest.raises(RequestError, match="value returned 1 numbers for 2 nodes"):
            best_of(session.root, 2, PARAMS, lambda nodes: [1.0])
        with pytest.raises(RequestError, match="has no log-probabilities"):
            likelihood(session.root.sample(1, PARAMS))


class TestMajority:
    def test_the_most_frequent_answer(self, session: Session) -> None:
        params = SamplingParams(temperature=1, max_tokens=1)
        vote = majority(session.root, 40, params, answer=lambda text: text[:1] or None)
        again = BareHost(toy_engine()).session([1, 2, 3], seed=1)
        texts = [node.text[:1] for node in again.root.sample(40, params)]
        most = max(texts.count(text) for text in texts if text)
        assert vote.answer and texts.count(vote.answer) == most == len(vote.nodes)
        assert vote.share == most / 40
        assert session.num_nodes == 1 + most

    def test_no_answer(self, session: Session) -> None:
        with pytest.raises(RequestError, match="none of the 3 texts has an answer"):
            majority(session.root, 3, PARAMS, answer=lambda text: None)
        assert session.num_nodes == 1

    def test_last_number(self) -> None:
        assert last_number("2 and 1,024.5 or -3.") == "-3"
        assert last_number("1,024.5") == "1024.5"
        assert last_number("none") is None


class TestMcts:
    def test_it_beats_as_many_random_paths(self, session: Session) -> None:
        params = SamplingParams(temperature=1.5, max_tokens=2)
        seen: list[Node] = []

        def value(nodes: list[Node]) -> list[float]:
            seen.extend(nodes)
            return [1 - sum(node.token_ids[3:]) / (23 * (node.num_tokens - 3)) for node in nodes]

        best = mcts(session.root, 30, params, branching=3, value=value)
        assert len(seen) == 90 and value([best])[0] == max(value(seen[:90]))
        assert best.num_tokens > session.root.num_tokens + 2

    def test_no_simulation(self, session: Session) -> None:
        assert mcts(session.root, 0, PARAMS) is session.root

    def test_a_complete_node_is_best(self, session: Session) -> None:
        limit = session.host.max_model_len
        params = SamplingParams(temperature=1, max_tokens=limit)
        best = mcts(session.root, 8, params, branching=2, value=low_tokens)
        assert best.num_tokens == limit  # and the other simulations visit complete nodes again

    def test_bounds(self, session: Session) -> None:
        start = _TreeNode(session.root, None)
        often, rarely = _TreeNode(session.root, start), _TreeNode(session.root, start)
        start.children = [often, rarely]
        for _ in range(9):
            often.visit(0.5)
        rarely.visit(0.4)
        assert start.visits == 10 and start.total == pytest.approx(4.9)
        assert often.uct(0) > rarely.uct(0) and often.uct(1.4) < rarely.uct(1.4) < inf


class TestTreeOfThoughts:
    def test_the_best_of_each_step(self, session: Session) -> None:
        best = tree_of_thoughts(session.root, 3, PARAMS, breadth=2, value=low_tokens)
        assert [node.name.count(".") for node in best] == [3, 3]
        assert all(node.is_open for node in best)
        again = BareHost(toy_engine()).session([1, 2, 3], seed=1)
        frontier = [again.root]
        for _ in range(3):
            grown = [node for group in again.sample(frontier, 4, PARAMS) for node in group]
            frontier = sorted(grown, key=lambda node: -low_tokens([node])[0])[:2]
        assert [node.token_ids for node in best] == [node.token_ids for node in frontier]

    def test_complete_texts_stay(self, session: Session) -> None:
        params = SamplingParams(temperature=1, max_tokens=session.host.max_model_len)
        best = tree_of_thoughts(session.root, 5, params, value=low_tokens)
        assert [node.name.count(".") for node in best] == [1, 1]


class TestChoose:
    def test_measures(self, session: Session) -> None:
        options = [["ab", "abcdef", "c"], ["a"]]
        nodes = [session.root, session.root.extend([4])]
        choice, only = choose(nodes, options)
        scores = session.root.score(options[0])
        assert choice.scores == scores
        totals = [score.total for score in scores]
        assert choice.best == totals.index(max(totals))
        assert sum(choice.probabilities) == pytest.approx(1)
        assert (only.best, only.probabilities) == (0, [1.0])
        for measure, values in {
            "per_token": [score.mean for score in scores],
            "per_byte": [
                score.total / len(text) for score, text in zip(scores, options[0], strict=True)
            ],
        }.items():
            assert choose(nodes, options, measure)[0].best == values.index(max(values))  # type: ignore[arg-type]

    def test_bad_options(self, session: Session) -> None:
        with pytest.raises(RequestError, match="options has an empty list"):
            choose([session.root], [[]])
        with pytest.raises(RequestError, match="measure must be total"):
            choose([session.root], [["a"]], "best")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="2 lists for 1 nodes"):
            choose([session.root], [["a"], ["b"]])
        assert choose([], []) == []


@pytest.mark.parametrize("page", ["search.md", "sessions.md", "beam_search.md"])
def test_the_examples_of_the_pages_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (PAGE.parent / page).read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    assert len(blocks) >= 2 and capsys.readouterr().out
    llm = names["llm"]
    assert llm.stats().kept_paths == 0  # type: ignore[attr-defined]
    llm.close()  # type: ignore[attr-defined]
