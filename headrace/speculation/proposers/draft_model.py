"""A smaller model drafts for a larger one (Leviathan et al. 2023; Chen et al. 2023).

It samples with the target's noise (Gumbel coupling). Each step rewinds its own KV to the
sequence's tokens, so preemption, forks and prefix hits need no code here.
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
"""Max known tokens in one step."""


def max_rows(depth: int) -> int:
    """Max slots that a draft of `depth` tokens reserves at once."""
    return _CATCH_UP_ROWS + depth - 1


@dataclass(slots=True, eq=False)
class _DraftContext:
    tables: Tables
    tokens: list[int] = field(default_factory=list)
    agreed: int = 0
    """Tokens that are known to equal the sequence's."""

    def rewind(self, known: list[int], kv: KvManager) -> None:
        """Drop the tokens that differ from `known`, and its last token, whose row gives logits.

        Drop all if a window has freed KV that the next row reads.
        """
        self.agreed += _num_common(self.tokens[self.agreed :], known[self.agreed : -1])
        if not kv.can_rewind(self.tables, self.agreed):
            self.agreed = 0
        del self.tokens[self.agreed :]
        kv.trim(self.tables, self.agreed)
        kv.advance(self.tables, self.agreed, self.agreed)


def _num_common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class DraftModelProposer:
    def __init__(
        self,
        executable: Executable,
        kv: KvManager,
        max_length: int,
        depth: int,
        width: int,
        *,
        probabilities: bool,
    ) -> None:
        self.traits = ProposerTraits(
            depth * width, width, in_engine_thread=True, time_limit=TIME_LIMIT
        )
        self.kv = kv
        self._executable = executable
        self._max_length = max_length
        self._depth = depth
        self._probabilities = probabilities
        self._contexts: WeakKeyDictionary[SequenceView, _DraftContext] = WeakKeyDictionary()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        chains: dict[int, Chain] = {}
        catching_up: list[tuple[_DraftContext, TokenRun]] = []
        rows_left = _CATCH_UP_ROWS
        new_requests = set[int]()
        for i, seq in enumerate(seqs):
            max_depth = self._max_length - len(seq.known)
            num_nodes = min(budgets[i], max_depth * self.traits.width)
            context = self._contexts.get(seq) or self._new_context(seq, new_requests)
            if num_nodes <= 0 or context is None:
                continue

            context.rewind(seq.known, self.kv)
            computed = context.agreed
            num_uncomputed = len(seq.known) - computed
            num_rows = min(num_uncomputed, rows_left)
            if not num_rows or not self._reserve(context, num_rows + self._depth - 1, seqs):
                continue
            rows_left -= num_rows
            if num_rows == num_uncomputed:
                chains[i] = chain(
                    seq, computed, context.tables, num_nodes, probabilities=self._probabilities
                )
            else:
                tokens = seq.known[computed : computed + num_rows]
                catching_up.append((context, TokenRun(tokens, computed, context.tables)))

        self._catch_up(catching_up)
        grow(self._executable, list(chains.values()), self.traits.width, self.kv.block_size)
        for i, grown in chains.items():  # the last token of a chain has no KV
            self._contexts[seqs[i]].tokens[:] = seqs[i].known + grown.path[:-1]
        return [chains[i].draft if i in chains else NO_DRAFT for i in range(len(seqs))]

    def _catch_up(self, contexts: list[tuple[_DraftContext, TokenRun]]) -> None:
        if contexts:
            runs = [run for _, run in contexts]
            batch = batch_of_runs(runs, self.kv.block_size, logits=False)
            self._executable.launch(batch).wait()
        for context, run in contexts:
            context.tokens += run.tokens

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        pass

    def _new_context(self, seq: SequenceView, new_requests: set[int]) -> _DraftContext | None:
        """A context that shares the KV of a sibling; None if it has none yet."""
        request = seq.seq_id[0]
        if request in new_requests:
            return None
        siblings = [each for other, each in self._contexts.items() if other.seq_id[0] == request]
        if siblings:
            num_common = [_num_common(sibling.tokens, seq.known) for sibling in siblings]
            best = int(np.argmax(num_common))
            tables = self.kv.fork(siblings[best].tables)
            context = _DraftContext(tables, siblings[best].tokens[: num_common[best]])
        else:
            context = _DraftContext(self.kv.new_tables())
            new_requests.add(request)
        self._contexts[seq] = context
        finalize(seq, self.kv.free, context.tables).atexit = False
        return context

    def _reserve(self, context: _DraftContext, length: int, busy: list[SequenceView]) -> bool:
        """Reserve slots, if necessary of sequences that do not draft; returns success."""
        while (copies := self.kv.allocate(context.tables, context.agreed, length)) is None:
            unused = next(
                (
                    other
                    for seq, other in self._contexts.items()
                    if any(other.tables) and seq not in busy
                ),
                None,
            )
            if unused is None:
                return False
            unused.tokens.clear()
            unused.agreed = 0
            self.kv.free(unused.tables)
        move_slots(self._executable, self.kv.slot_copies(copies))
        return True
