"""A smaller model drafts what the larger one will draw (Leviathan et al. 2023; Chen et al. 2023).

The draft draws with the noise that the target will use at the same place, so that of two near
distributions both draw the same token as often as not: the Gumbel coupling that needs no
probabilities. Its KV follows the sequences: what it has of a sequence is kept beside it, compared
with what is known by now, rewound to where they part, and caught up with. So preemption, forks and
prefix hits of the target need nothing here.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, finalize

import numpy as np

from headrace.backend import Executable
from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.kv.manager import KvManager, Tables
from headrace.kv.rows import TokenRun, batch_of_runs, move_slots
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView
from headrace.speculation.proposers.chains import TIME_LIMIT, Chain, chain, grow

_CATCH_UP_ROWS = 512
"""Known tokens that may be computed in one step: a long prompt is caught up with over several."""


def max_rows(depth: int) -> int:
    """Most slots of a sequence that are reserved at once by a draft of so many depths."""
    return _CATCH_UP_ROWS + depth - 1


@dataclass(slots=True, eq=False)
class _DraftContext:
    """What the draft has of a sequence."""

    tables: Tables
    tokens: list[int] = field(default_factory=list)  # with KV
    agreed: int = 0  # so many of them are known to be those of the sequence

    def follow(self, known: list[int], kv: KvManager) -> None:
        """Rewind to where it parts from what is known, and before the last token: that one is to
        give logits.

        To the beginning, where windows have let go what would be seen there.
        """
        self.agreed += _num_common(self.tokens[self.agreed :], known[self.agreed : -1])
        if not kv.sees_all(self.tables, self.agreed):
            self.agreed = 0
        del self.tokens[self.agreed :]
        kv.trim(self.tables, self.agreed)
        kv.advance(self.tables, self.agreed, self.agreed)


def _num_common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class DraftModelProposer:
    """Drafts what another model draws."""

    def __init__(
        self,
        executable: Executable,
        kv: KvManager,
        longest: int,
        depth: int,
        width: int,
        *,
        probabilities: bool,
    ) -> None:
        self.traits = ProposerTraits(
            depth * width, width, in_engine_thread=True, time_limit=TIME_LIMIT
        )
        self.kv = kv
        """The draft model's own."""
        self._executable = executable
        self._longest = longest  # what the draft was trained for
        self._depth = depth
        self._probabilities = probabilities
        self._drafts: WeakKeyDictionary[SequenceView, _DraftContext] = WeakKeyDictionary()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        chains: dict[int, Chain] = {}
        behind: list[tuple[_DraftContext, TokenRun]] = []
        rows, begun = _CATCH_UP_ROWS, set[int]()
        for i, seq in enumerate(seqs):
            nodes = min(budgets[i], (self._longest - len(seq.known)) * self.traits.width)
            draft = self._drafts.get(seq) or self._begin(seq, begun)
            if nodes <= 0 or draft is None:
                continue
            draft.follow(seq.known, self.kv)
            num_uncomputed = len(seq.known) - draft.agreed
            num_rows = min(num_uncomputed, rows)
            if not num_rows or not self._reserve(draft, num_rows + self._depth - 1, seqs):
                continue
            rows -= num_rows
            if num_rows == num_uncomputed:
                chains[i] = chain(
                    seq, draft.agreed, draft.tables, nodes, probabilities=self._probabilities
                )
            else:
                behind.append(
                    (
                        draft,
                        TokenRun(
                            seq.known[draft.agreed : draft.agreed + num_rows],
                            draft.agreed,
                            draft.tables,
                        ),
                    )
                )
        self._catch_up(behind)
        grow(self._executable, list(chains.values()), self.traits.width, self.kv.block_size)
        for i, grown in chains.items():  # the last token of a chain has no KV
            self._drafts[seqs[i]].tokens[:] = seqs[i].known + grown.path[:-1]
        return [chains[i].draft if i in chains else NO_DRAFT for i in range(len(seqs))]

    def _catch_up(self, behind: list[tuple[_DraftContext, TokenRun]]) -> None:
        if behind:
            self._executable.launch(
                batch_of_runs([run for _, run in behind], self.kv.block_size, logits=False)
            ).wait()
        for draft, run in behind:
            draft.tokens += run.tokens

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        pass

    def _begin(self, seq: SequenceView, begun: set[int]) -> _DraftContext | None:
        """A draft that shares what one of the same request has; None: one has just begun, and in
        the next step will have more.
        """
        request = seq.seq_id[0]
        if request in begun:
            return None
        kin = [draft for other, draft in self._drafts.items() if other.seq_id[0] == request]
        if kin:
            common = [_num_common(other.tokens, seq.known) for other in kin]
            best = int(np.argmax(common))
            draft = _DraftContext(self.kv.fork(kin[best].tables), kin[best].tokens[: common[best]])
        else:
            draft = _DraftContext(self.kv.new_tables())
            begun.add(request)
        self._drafts[seq] = draft
        finalize(seq, self.kv.free, draft.tables).atexit = False
        return draft

    def _reserve(self, draft: _DraftContext, length: int, busy: list[SequenceView]) -> bool:
        """Slots behind what is computed, at the cost of sequences that do not draft now; whether
        there are enough.
        """
        while (copies := self.kv.reserve(draft.tables, draft.agreed, length)) is None:
            unused = next(
                (
                    other
                    for seq, other in self._drafts.items()
                    if any(other.tables) and seq not in busy
                ),
                None,
            )
            if unused is None:
                return False
            unused.tokens.clear()
            unused.agreed = 0
            self.kv.free(unused.tables)
        move_slots(self._executable, self.kv.slots_of(copies))
        return True
