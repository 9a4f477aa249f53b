"""Draft trees that grow at their likeliest nodes, and change no token."""

import math
from typing import Any

import numpy as np
import pytest

from headrace.batch import RaggedBatch
from headrace.kv.rows import TokenRun
from headrace.logit_ops import Expand, Expanded, StepResult
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers.chains import confidence_class
from headrace.speculation.proposers.dynamic_tree import GrowingTree, grow_trees, launched_nodes
from tests.draft_engines import draft_engine
from tests.drafters import random_drafter
from tests.engine.toy import toy_kv
from tests.speculation.test_draft_model import sequence
from tests.tiny import run_all, tiny_model

VOCAB = 8


def chances(path: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The distribution after a path [vocab]: deterministic, and different for each path."""
    logits = np.random.default_rng(sum((token + 1) * 31**i for i, token in enumerate(path)))
    p = np.exp(logits.normal(0, 2, VOCAB))
    return np.asarray(p / p.sum())


class Model:
    """Answers `Expand` ops from `chances`, by the path that each launched row sees."""

    def __init__(self) -> None:
        self.launches: list[int] = []
        """Rows of each launch."""

    def launch(self, batch: RaggedBatch, ops: Any, trees: Any) -> StepResult:
        self.launches.append(len(batch.tokens))
        values: list[Any] = []
        for op in ops:
            assert isinstance(op, Expand)
            row = int(batch.logit_rows[op.row])
            path: tuple[int, ...] = ()
            if batch.ancestors is not None:
                start = batch.row_start[int(batch.seq_of[op.row])]
                seen = [i for i in range(64) if int(batch.ancestors[row, 0]) >> i & 1]
                path = tuple(int(batch.tokens[start + i]) for i in seen)
                assert batch.positions[row] == batch.context_len[0] + len(path) - 1
            p = chances(path)
            best = np.argsort(-p)[: op.width].tolist()
            values.append(Expanded(best, None, [math.log(p[token]) for token in best]))
        return StepResult(values)


def growing(budget: int, depth: int, pays: Any = lambda path: True) -> GrowingTree:
    kv = toy_kv(8, 4)
    tables = kv.new_tables()
    kv.allocate(tables, 0, 3 + budget)
    run = TokenRun([1, 2, 3], 0, tables)
    return GrowingTree(sequence(run.tokens), run, budget, depth, pays)


def best_paths(budget: int, depth: int, width: int) -> set[tuple[int, ...]]:
    """The likeliest nodes by the definition of the search."""
    found: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(min(depth, budget)):
        level: dict[tuple[int, ...], float] = {}
        for path in frontier:
            p = chances(path)
            for token in np.argsort(-p)[: min(width, budget)].tolist():
                level[(*path, token)] = found.get(path, 0.0) + math.log(p[token])
        found |= level
        frontier = sorted(level, key=lambda path: -level[path])[:width]
    return set(sorted(found, key=lambda path: -found[path])[:budget])


def paths_of(tree: GrowingTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    draft = tree.draft
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        assert parent < len(paths)
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return paths


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_draft_has_the_likeliest_nodes(width: int, depth: int) -> None:
    tree, model = growing(width * depth, depth), Model()
    grow_trees([tree], width, 4, model.launch, model.launch)
    paths = paths_of(tree)
    assert set(paths) == best_paths(width * depth, depth, width) and len(model.launches) == depth
    draft = tree.draft
    for path, confidence in zip(paths, draft.confidence, strict=True):  # type: ignore[arg-type]
        assert confidence == confidence_class(math.log(chances(path[:-1])[path[-1]]))


def test_a_launch_has_rows_for_the_nodes_to_expand_and_their_ancestors() -> None:
    tree, model = growing(12, 4), Model()
    grow_trees([tree], 3, 4, model.launch, model.launch)
    assert model.launches[0] == 3 and model.launches[1] == 3
    assert all(3 <= rows <= 9 for rows in model.launches[2:])
    tree.expanding = [node for node in range(len(tree.tokens)) if tree.depths[node] == 3][:1]
    assert launched_nodes(tree) == tree.path(tree.expanding[0])


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_rows_and_nodes_stay_within_the_budget(budget: int) -> None:
    tree, model = growing(budget, 4), Model()
    grow_trees([tree], 4, 4, model.launch, model.launch)
    assert len(tree.draft.tokens) == budget and len(model.launches) <= budget
    assert max(model.launches[1:], default=0) <= budget


def test_trees_end_below_nodes_that_do_not_pay() -> None:
    model = Model()
    asked: list[list[int]] = []

    def pays(confidences: Any) -> bool:
        asked.append(list(confidences))
        return len(confidences) < 2

    trees = [growing(12, 4, pays), growing(12, 4, lambda path: False)]
    grow_trees(trees, 3, 4, model.launch, model.launch)
    assert [max(tree.depths) for tree in trees] == [2, 1]
    assert {len(path) for path in asked} == {1, 2}


GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=16, ignore_eos=True)
PENALTIES = SamplingParams(
    temperature=0.8, seed=5, max_tokens=16, ignore_eos=True, presence_penalty=0.6, min_p=0.02
)


@pytest.mark.parametrize("how", ["draft_model", "self_draft", "EAGLE-3"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_trees_change_no_token(how: str, backend: str) -> None:
    model = tiny_model(0)
    requests = [
        ([3, 1, 4, 1, 5], GREEDY),
        ([2, 7, 1], SAMPLED),
        ([9, 9, 2, 6], PENALTIES),
    ]
    plain, _ = draft_engine(model, "off", backend)
    wanted = [each.outputs[0].token_ids for each in run_all(plain, requests)]
    drafter = random_drafter(model, vocab=20) if how == "EAGLE-3" else None
    method = "draft_model" if drafter else how
    engine, _ = draft_engine(
        model, method, backend, drafter=drafter, depth=4, width=3, adaptive_speculation=False
    )
    got = [each.outputs[0].token_ids for each in run_all(engine, requests)]
    stats = engine.stats()
    assert got == wanted and stats.drafted > 0 and stats.proposer_failures == 0
    if how == "draft_model":  # the model itself: its likeliest path is in the tree
        assert stats.accepted > 20
