"""A proposer of random draft trees that are partly right."""

import random
from collections import Counter
from collections.abc import Mapping

from headrace.batch import Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView


class RandomTrees:
    """Proposes trees of random size and shape. `truth` maps a sequence id to all its known
    tokens.
    """

    def __init__(
        self,
        seed: int,
        vocab: int,
        truth: Mapping[tuple[int, int], list[int]],
        max_nodes: int = 9,
        right: float = 0.7,
    ) -> None:
        self.traits = ProposerTraits(max_nodes, in_engine_thread=True, time_limit=None)
        self.commits: list[Commit] = []
        self._random = random.Random(seed)
        self._vocab = vocab
        self._truth = truth
        self._right = right

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        return [self._tree(seq, nodes) for seq, nodes in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        named = Counter(commit.source for commit in commits)
        for commit in commits:
            known = seqs[commit.source].known
            assert (
                known[len(known) - len(commit.tokens) :] == commit.tokens
                or named[commit.source] > 1
            )
        self.commits += commits

    def _tree(self, seq: SequenceView, budget: int) -> DraftTree:
        rng, truth = self._random, self._truth.get(seq.seq_id, [])
        tokens: list[int] = []
        parents: list[int] = []
        depth_if_right = {-1: 0}  # nodes whose path is right so far
        for node in range(rng.randint(0, budget)):
            parent = node - 1 if rng.random() < 0.5 else rng.randint(-1, node - 1)
            place = (
                len(seq.known) + depth_if_right[parent] if parent in depth_if_right else len(truth)
            )
            token = (
                truth[place]
                if place < len(truth) and rng.random() < self._right
                else rng.randrange(self._vocab)
            )
            if place < len(truth) and token == truth[place]:
                depth_if_right[node] = depth_if_right[parent] + 1
            tokens.append(token)
            parents.append(parent)
        return DraftTree(tokens, parents)
