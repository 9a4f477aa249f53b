"""Self-draft: the model, shortened, drafts over its own KV.

It may have fewer layers, or weights in fewer bytes. The KV of drafts lies in slots that the step
writes again. (Zhang et al. 2024, Draft & Verify; Elhoushi et al. 2024, LayerSkip)
"""

from collections.abc import Sequence
from functools import partial

from headrace.backend import Executable
from headrace.batch import NO_DRAFT, Commit, DraftTree, RaggedBatch
from headrace.logit_ops import Expand, StepResult
from headrace.proposer import Pays, ProposerTraits, SequenceView, always_pays
from headrace.speculation.proposers.chains import ACCEPTANCE, TIME_LIMIT, Chain, chain, grow

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
        self._block_size = block_size
        self._probabilities = probabilities

    def propose(
        self, seqs: list[SequenceView], budgets: list[int], pays: Pays = always_pays
    ) -> list[DraftTree]:
        chains = {
            i: chain(
                seq,
                seq.computed,
                seq.tables,
                nodes,
                probabilities=self._probabilities,
                pays=partial(pays, i),
            )
            for i, (seq, nodes) in enumerate(zip(seqs, budgets, strict=True))
            if nodes > 0 and len(seq.known) - seq.computed <= _MAX_UNCOMPUTED
        }
        grow(self._launch, list(chains.values()), self.traits.width, self._block_size)
        return [chains[i].draft if i in chains else NO_DRAFT for i in range(len(seqs))]

    def _launch(
        self, batch: RaggedBatch, ops: Sequence[Expand], chains: Sequence[Chain]
    ) -> StepResult:
        return self._executable.launch(batch, ops).wait()

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        pass
