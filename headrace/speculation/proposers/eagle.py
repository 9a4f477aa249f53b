"""EAGLE-3 drafts with a small layer over rows of the target (Li et al. 2025).

The *pair* of position p joins the target's row of p with the token at p + 1, so that its logits
draft the token at p + 2. A sequence has a context of its pairs, with KV of its own; pairs of drafts
come after them and are dropped. After a prefix hit of the target, which computes no rows, the
context begins with the same pairs of an earlier sequence, from a prefix cache of its own. Any other
position whose row was not seen has no pair, and its neighbours lie side by side.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np

from headrace.backend import DeviceDrafter
from headrace.backend.mapped_logits import MappedLogits
from headrace.batch import NO_DRAFT, Commit, DraftTree, RaggedBatch
from headrace.kv.manager import KvManager, Tables
from headrace.kv.prefix import Hit, Node, PrefixCache
from headrace.kv.rows import TokenRun, batch_of_runs, move_slots
from headrace.logit_ops import Expand, Expanded, StepResult
from headrace.proposer import Pays, ProposerTraits, SequenceView, always_pays
from headrace.record import frozen
from headrace.speculation.proposers.chains import ACCEPTANCE, TIME_LIMIT, Chain, chain
from headrace.speculation.proposers.device_chains import grow_on_device
from headrace.speculation.proposers.dynamic_tree import GrowingTree, grow_trees, launched_nodes

Row = Any
"""A row of the target or of the drafter: floats [width], or the handle of a row on a device."""

_MAX_ROWS = 512
"""Max pairs in one launch."""
_MAX_WAITING = 128
"""Max rows that a sequence keeps before their pairs are computed."""
_MAX_WAITING_ON_DEVICE = 16
"""The same, if the rows take memory of a device."""


def max_rows(nodes: int) -> int:
    """Max slots that a draft of `nodes` tokens reserves at once."""
    return _MAX_ROWS + nodes - 1


@frozen(eq=False)
class DrafterPrograms:
    """A compiled drafter."""

    from_target: MappedLogits
    """Its input are rows of the target."""
    from_itself: MappedLogits
    """Its input are its own hidden rows."""
    kv: KvManager
    max_length: int
    """Max pairs of a sequence."""
    on_device: DeviceDrafter | None = None
    """The same programs, if their device keeps the rows of the target."""


@dataclass(slots=True, eq=False)
class _Context:
    tables: Tables
    places: list[int] = field(default_factory=list)
    """Positions of the pairs that have KV, ascending."""
    node: Node | None = None
    """The last node of its full blocks in the prefix cache; None: they are not kept."""
    waiting: list[tuple[int, Row]] = field(default_factory=list)
    """Positions and rows of pairs without KV, ascending and after `places`."""
    is_idle: bool = False
    """Whether it has not drafted since rows were last computed or dropped. Then rows of the output
    are dropped, so that drafts that do not pay cost no launch.
    """

    @property
    def end(self) -> int:
        """The first position that it has not seen."""
        return 1 + (self.waiting[-1][0] if self.waiting else self.places[-1] if self.places else -1)


@dataclass(slots=True, eq=False)
class _Pairs:
    """Pairs of one sequence in a launch."""

    seq: SequenceView
    context: _Context
    run: TokenRun
    rows: Sequence[Row]  # [pairs]


class EagleProposer:
    def __init__(
        self,
        programs: DrafterPrograms,
        depth: int,
        width: int,
        *,
        probabilities: bool,
        prefix_cache: bool,
    ) -> None:
        self.traits = ProposerTraits(
            depth * width,
            width,
            in_engine_thread=True,
            time_limit=TIME_LIMIT,
            acceptance=ACCEPTANCE,
            needs_taps=True,
        )
        self._depth = depth
        self._probabilities = probabilities
        self._has_cache = prefix_cache
        self.use(programs)

    def use(self, programs: DrafterPrograms) -> None:
        """Draft with a compiled drafter, of the same shapes as before. All contexts start anew."""
        self.kv = programs.kv
        self._programs = programs
        self._cache = PrefixCache(programs.kv) if self._has_cache else None
        self._contexts: WeakKeyDictionary[SequenceView, _Context] = WeakKeyDictionary()

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        rows_of_step = self._rows_of(result)
        if rows_of_step is None:
            return
        full: dict[SequenceView, _Context] = {}
        seen = set[int]()
        for commit in commits:
            # The first commit of a source belongs to the sequence, further ones to its forks.
            if commit.source in seen:
                continue
            seen.add(commit.source)
            seq = seqs[commit.source]
            context = self._context(seq, commit.position)
            rows = [*commit.rows, *(commit.rows.stop + node for node in commit.path)]
            for position, row in enumerate(rows, commit.position):
                if position >= context.end:
                    context.waiting.append((position, rows_of_step(row)))
            if len(context.waiting) > self._max_waiting:
                if context.is_idle and context.waiting[0][0] >= seq.prompt_len:
                    del context.waiting[: -(self._max_waiting // 2)]
                else:
                    full[seq] = context
                context.is_idle = True
        if full:
            self._catch_up(full, kept=self._max_waiting // 2, busy=seqs)

    @property
    def _max_waiting(self) -> int:
        return _MAX_WAITING_ON_DEVICE if self._programs.on_device else _MAX_WAITING

    def _rows_of(self, result: StepResult) -> Callable[[int], Row] | None:
        """A function from the index of a row in a step to the row; None without rows."""
        if result.kept_taps is not None:
            return result.kept_taps.__getitem__
        taps = result.taps
        return None if taps is None else lambda row: taps[row].copy()

    def propose(
        self, seqs: list[SequenceView], budgets: list[int], pays: Pays = always_pays
    ) -> list[DraftTree]:
        contexts = [self._context(seq, seq.computed) for seq in seqs]
        ready = {
            i: context
            for i, (seq, context) in enumerate(zip(seqs, contexts, strict=True))
            if budgets[i] > 0
            and context.end == len(seq.known) - 1
            and context.waiting
            and len(context.places) + len(context.waiting) < self._programs.max_length
        }
        for context in ready.values():
            context.is_idle = False
        by_seq = {seqs[i]: context for i, context in ready.items()}
        if sum(len(context.waiting) for context in by_seq.values()) > _MAX_ROWS:
            self._catch_up(by_seq, kept=1, busy=seqs)

        pairs = {
            i: self._pairs(seqs[i], context, len(context.waiting))
            for i, context in ready.items()
            if context.waiting and self._reserve(context, seqs)
        }
        # The device keeps no rows of trees.
        if self.traits.width > 1 and self._programs.on_device is None:
            drafts = self._trees(pairs, budgets, pays)
        else:
            drafts = self._chains(pairs, budgets, pays)
        return [drafts.get(i, NO_DRAFT) for i in range(len(seqs))]

    def _chains(
        self, pairs: dict[int, _Pairs], budgets: list[int], pays: Pays
    ) -> dict[int, DraftTree]:
        chains: dict[int, tuple[Chain, _Pairs]] = {}
        for i, first in pairs.items():
            context = first.context
            grown = chain(
                first.seq,
                len(context.places),
                context.tables,
                min(budgets[i], self._max_depth(context) * self.traits.width),
                probabilities=self._probabilities,
                pays=partial(pays, i),
            )
            grown.run = first.run
            chains[i] = grown, first
        self._grow(list(chains.values()))
        return {i: grown.draft for i, (grown, _) in chains.items()}

    def _trees(
        self, pairs: dict[int, _Pairs], budgets: list[int], pays: Pays
    ) -> dict[int, DraftTree]:
        trees = {
            i: GrowingTree(
                seq=first.seq,
                run=first.run,
                budget=min(budgets[i], self._max_depth(first.context) * self.traits.width),
                depth=self._max_depth(first.context),
                pays=partial(pays, i),
            )
            for i, first in pairs.items()
        }

        def launch_first(
            batch: RaggedBatch, ops: Sequence[Expand], _: Sequence[GrowingTree]
        ) -> StepResult:
            inputs = np.stack([row for each in pairs.values() for row in each.rows])
            return self._programs.from_target.launch(batch._replace(inputs=inputs), ops)

        def launch_later(
            batch: RaggedBatch, ops: Sequence[Expand], growing: Sequence[GrowingTree]
        ) -> StepResult:
            inputs = [
                tree.rows.get(tree.parents[node], tree.root_row)
                for tree in growing
                for node in launched_nodes(tree)
            ]
            return self._programs.from_itself.launch(batch._replace(inputs=np.stack(inputs)), ops)

        width, block_size = self.traits.width, self.kv.block_size
        grow_trees(list(trees.values()), width, block_size, launch_first, launch_later)
        for first in pairs.values():
            self._keep(first)
        return {i: tree.draft for i, tree in trees.items()}

    def _max_depth(self, context: _Context) -> int:
        left = self._programs.max_length - len(context.places) - len(context.waiting)
        return min(self._depth, left + 1)

    def _grow(self, growing: list[tuple[Chain, _Pairs]]) -> None:
        """Extend the chains, first from the target's rows, then from the drafter's own."""
        if on_device := self._programs.on_device:
            chains = [(grown, first.rows) for grown, first in growing]
            grow_on_device(on_device, chains, self.traits.width, self.kv.block_size)
            for _, first in growing:
                self._keep(first)
            return
        width, program = self.traits.width, self._programs.from_target
        pairs = [first for _, first in growing]
        while growing:
            batch = _batch(pairs, self.kv.block_size, logits=True)
            ops = [grown.expand(row, width) for row, (grown, _) in enumerate(growing)]
            result = program.launch(batch, ops)
            assert result.hidden is not None
            hidden = result.hidden.copy()
            if program is self._programs.from_target:
                for each in pairs:
                    self._keep(each)
                program = self._programs.from_itself

            left: list[tuple[Chain, _Pairs]] = []
            for (grown, last), value, row in zip(growing, result.values, hidden, strict=True):
                if isinstance(value, Expanded):
                    grown.grow(value, width)
                    if grown.num_left > 0:
                        left.append((grown, _Pairs(last.seq, last.context, grown.run, [row])))
            growing, pairs = left, [each for _, each in left]

    def _catch_up(
        self, contexts: dict[SequenceView, _Context], kept: int, busy: Sequence[SequenceView]
    ) -> None:
        """Compute the KV of waiting pairs, except the last `kept` of each sequence."""
        left = {seq: context for seq, context in contexts.items() if len(context.waiting) > kept}
        while left:
            rows_left, pairs = _MAX_ROWS, list[_Pairs]()
            for seq, context in left.items():
                count = min(len(context.waiting) - kept, rows_left)
                fits = len(context.places) + count <= self._programs.max_length
                if count and fits and self._reserve(context, busy, count):
                    rows_left -= count
                    pairs.append(self._pairs(seq, context, count))
                elif count:  # without room, the sequence drafts no more from these rows
                    del context.waiting[: len(context.waiting) - kept]
            if pairs:
                self._compute(pairs)
            for each in pairs:
                self._keep(each)
            left = {seq: each for seq, each in left.items() if len(each.waiting) > kept}

    def _compute(self, pairs: Sequence[_Pairs]) -> None:
        """Compute the KV of pairs."""
        if on_device := self._programs.on_device:
            batch = batch_of_runs([each.run for each in pairs], self.kv.block_size, logits=False)
            on_device.start(batch, [], [row for each in pairs for row in each.rows])
        else:
            self._programs.from_target.launch(_batch(pairs, self.kv.block_size, logits=False), [])

    def _pairs(self, seq: SequenceView, context: _Context, count: int) -> _Pairs:
        waiting = context.waiting[:count]
        tokens = [seq.known[position + 1] for position, _ in waiting]
        run = TokenRun(tokens, len(context.places), context.tables)
        return _Pairs(seq, context, run, [row for _, row in waiting])

    def _keep(self, pairs: _Pairs) -> None:
        """Note that the pairs have KV."""
        context, count = pairs.context, len(pairs.run.tokens)
        context.places += [position for position, _ in context.waiting[:count]]
        del context.waiting[:count]

        num_pairs = len(context.places)
        if context.node is None or self._cache is None:
            return
        if context.places[-1] != num_pairs - 1:  # there is a gap
            context.node = None
        elif (context.node.depth + 1) * self.kv.block_size <= num_pairs:
            tokens = pairs.seq.known[1 : num_pairs + 1]
            context.node = self._cache.insert(context.node, context.tables, tokens, num_pairs)

    def _context(self, seq: SequenceView, first: int) -> _Context:
        """The sequence's context. A new one shares the pairs of a sibling, or pairs of earlier
        sequences up to position `first`.
        """
        context = self._contexts.get(seq)
        if context is not None:
            return context
        context = _Context(self.kv.new_tables())
        sibling, num_common = self._nearest_sibling(seq)
        if sibling:
            # A pair needs its token, and a row only the tokens up to its own.
            count = bisect_left(sibling.places, num_common - 1)
            context = _Context(self.kv.fork(sibling.tables), sibling.places[:count])
            self.kv.trim(context.tables, count)
            context.waiting = [each for each in sibling.waiting if each[0] < num_common]
        elif self._cache:
            # The first pair has the second token. The first token has to be the same, too.
            tokens = seq.known[1 : first + 1]
            node = self._cache.match((seq.scope, seq.known[0]), tokens, len(tokens))
            num_pairs = node.depth * self.kv.block_size
            self._cache.share(Hit(node, self._cache.blocks(node), num_pairs), context.tables)
            context.places, context.node = list(range(num_pairs)), node
        self._contexts[seq] = context
        finalize(seq, self.kv.free, context.tables).atexit = False
        return context

    def _nearest_sibling(self, seq: SequenceView) -> tuple[_Context | None, int]:
        """The context of the request's sequence with the most common tokens, and their number."""
        nearest, most = None, -1
        for other, context in self._contexts.items():
            if other.seq_id[0] == seq.seq_id[0]:
                num_common = _num_common(other.known, seq.known)
                if num_common > most:
                    nearest, most = context, num_common
                if most >= len(seq.known) - 1:  # beams fork in each step, so look no further
                    break
        return nearest, most

    def _reserve(
        self, context: _Context, busy: Sequence[SequenceView], count: int | None = None
    ) -> bool:
        """Reserve slots for the first `count` waiting pairs, or for all and a draft.

        If necessary, it takes the slots of sequences that do not draft. Returns success.
        """
        computed = len(context.places)
        num_slots = count
        if num_slots is None:
            num_slots = len(context.waiting) + (self._depth - 1) * self.traits.width
        self.kv.trim(context.tables, computed)
        self.kv.advance(context.tables, computed, computed)
        while (copies := self.kv.allocate(context.tables, computed, num_slots)) is None:
            unused = next(
                (
                    other
                    for seq, other in self._contexts.items()
                    if any(other.tables) and other is not context and seq not in busy
                ),
                None,
            )
            if unused is None:
                return False
            unused.places.clear()
            unused.waiting.clear()
            unused.node = None
            self.kv.free(unused.tables)
        move_slots(self._programs.from_target.executable, self.kv.slot_copies(copies))
        return True


def _batch(pairs: Sequence[_Pairs], block_size: int, *, logits: bool) -> RaggedBatch:
    batch = batch_of_runs([each.run for each in pairs], block_size, logits=logits)
    return batch._replace(inputs=np.stack([row for each in pairs for row in each.rows]))


def _num_common(a: list[int], b: list[int]) -> int:
    """Halve the part that differs: comparing slices is much faster than a loop over tokens."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
