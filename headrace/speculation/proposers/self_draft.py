"""Self-draft: the model, shortened, drafts over its own KV.

It may have fewer layers, or weights in fewer bytes. The KV of drafts lies in slots that the step
writes again. (Zhang et al. 2024, Draft & Verify; Elhoushi et al. 2024, LayerSkip)
"""

from collections.abc import Sequence
from functools import partial

from headrace.backend import Executable
from headrace.batch import NO_DRAFT, Commit, DraftTree, RaggedBatch
from headrace.kv.rows import TokenRun
from headrace.logit_ops import Expand, StepResult
from headrace.proposer import Pays, ProposerTraits, SequenceView, always_pays
from headrace.speculation.proposers.chains import ACCEPTANCE, TIME_LIMIT, chain, grow
from headrace.speculation.proposers.dynamic_tree import GrowingTree, grow_trees

_MAX_UNCOMPUTED = 16
"""Tokens without KV, which are computed twice. More cost more than a draft gains."""


class SelfDraftProposer:
    def __init__(
        self,
        executable: Executable,
        block_size: int,
        depth: int,
        width: int,
        *,
        probabilities: bool,
    ) -> None:
        self.traits = ProposerTraits(
            depth * width,
            width,
            in_engine_thread=True,
            time_limit=TIME_LIMIT,
            acceptance=ACCEPTANCE,
        )
        self._executable = executable
        self._depth = depth
        self._block_size = block_size
        self._probabilities = probabilities

    def propose(
        self, seqs: list[SequenceView], budgets: list[int], pays: Pays = always_pays
    ) -> list[DraftTree]:
        drafting = {
            i: (seq, nodes)
            for i, (seq, nodes) in enumerate(zip(seqs, budgets, strict=True))
            if nodes > 0 and len(seq.known) - seq.computed <= _MAX_UNCOMPUTED
        }
        if self.traits.width > 1:
            grown = self._trees(drafting, pays)
        else:
            grown = self._chains(drafting, pays)
        return [grown.get(i, NO_DRAFT) for i in range(len(seqs))]

    def _trees(
        self, drafting: dict[int, tuple[SequenceView, int]], pays: Pays
    ) -> dict[int, DraftTree]:
        trees = {
            i: GrowingTree(
                seq=seq,
                run=TokenRun(seq.known[seq.computed :], seq.computed, seq.tables),
                budget=nodes,
                depth=self._depth,
                pays=partial(pays, i),
            )
            for i, (seq, nodes) in drafting.items()
        }
        width, block_size = self.traits.width, self._block_size
        grow_trees(list(trees.values()), width, block_size, self._launch, self._launch)
        return {i: tree.draft for i, tree in trees.items()}

    def _chains(
        self, drafting: dict[int, tuple[SequenceView, int]], pays: Pays
    ) -> dict[int, DraftTree]:
        chains = {
            i: chain(
                seq,
                seq.computed,
                seq.tables,
                nodes,
                probabilities=self._probabilities,
                pays=partial(pays, i),
            )
            for i, (seq, nodes) in drafting.items()
        }
        grow(self._launch, list(chains.values()), self.traits.width, self._block_size)
        return {i: each.draft for i, each in chains.items()}

    def _launch(
        self, batch: RaggedBatch, ops: Sequence[Expand], growing: Sequence[object]
    ) -> StepResult:
        return self._executable.launch(batch, ops).wait()

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        pass
