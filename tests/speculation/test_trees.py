"""Draft trees: building and pruning."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.batch import DraftTree
from headrace.speculation.proposers.trees import Tree, merge, prune


def test_merged_chains_share_their_prefixes() -> None:
    assert merge([[1, 2, 3], [1, 2, 4], [1, 5, 6]], 9) == DraftTree(
        [1, 2, 5, 3, 4, 6], [-1, 0, 0, 1, 1, 2]
    )
    assert merge([[1, 2], [1, 2]], 9) == DraftTree([1, 2], [-1, 0])
    assert merge([[1, 2, 3], [4]], 9, confidence=2) == DraftTree([1, 4, 2, 3], [-1, -1, 0, 2], 2)
    assert merge([], 9) == DraftTree([], [])


def test_pruned_nodes_keep_their_confidence() -> None:
    tree = DraftTree([1, 2, 3], [-1, -1, 1], confidence=[4, 5, 6])
    assert prune(tree, [1, 2]) == DraftTree([2, 3], [-1, 0], confidence=[5, 6])
    assert prune(tree._replace(confidence=3), [1]) == DraftTree([2], [-1], confidence=3)


def test_chains_in_a_tree_share_their_prefixes() -> None:
    tree = Tree(5)
    assert tree.add_chain([1, 2, 3]) == [0, 1, 2]
    assert tree.add_chain([1, 2, 4]) == [0, 1, 3]
    assert tree.add_chain([9, 9], parent=1) == [4]  # the budget ends before the second
    assert (tree.tokens, tree.parents) == ([1, 2, 3, 4, 9], [-1, 0, 1, 1, 1])


def paths(draft: DraftTree) -> set[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=4), st.integers(0, 9), st.data())
def test_pruning_keeps_paths(chains: list[list[int]], budget: int, data: st.DataObject) -> None:
    draft = merge(chains, budget)
    assert len(draft.tokens) <= budget and paths(draft) <= {
        tuple(c[:i]) for c in chains for i in range(1, len(c) + 1)
    }
    kept: list[int] = []
    for node, parent in enumerate(draft.parents):
        if (parent < 0 or parent in kept) and data.draw(st.booleans()):
            kept.append(node)
    pruned = prune(draft, kept)
    assert all(-1 <= parent < node for node, parent in enumerate(pruned.parents))
    all_paths = paths(draft)
    assert len(paths(pruned)) == len(kept) and paths(pruned) <= all_paths


def test_pruning_keeps_the_rest_of_a_draft() -> None:
    probabilities = np.arange(6.0).reshape(3, 2)
    pruned = prune(DraftTree([5, 6, 7], [-1, 0, 0], 2, True, probabilities), [0, 2])
    assert pruned[:4] == ([5, 7], [-1, 0], 2, True)
    assert pruned.probabilities is not None and pruned.probabilities.tolist() == [[0, 1], [4, 5]]
    assert prune(DraftTree([5, 6], [-1, 0]), [0]) == DraftTree([5], [-1])
