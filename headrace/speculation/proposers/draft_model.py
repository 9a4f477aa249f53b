"""A smaller model drafts for a larger one (Leviathan et al. 2023; Chen et al. 2023).

It samples with the target's noise (Gumbel coupling). Each step rewinds its own KV to the
sequence's tokens, so preemption, forks and prefix hits need no code here.

A draft model with another vocabulary reads the text of the sequence in tokens of its own
(universal assisted generation, Timor et al. 2025). It drafts its likeliest tokens, whose text is
cut into tokens of the target. If it has most of the target's tokens, and the sequence is sampled or
has a constraint, it drafts shared tokens alone: with the target's noise of their ids, and only
those that the constraint allows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self
from weakref import WeakKeyDictionary, finalize

from headrace.backend import Executable
from headrace.backend.mapped_logits import MappedLogits
from headrace.batch import NO_DRAFT, Commit, DraftTree, Ints, RaggedBatch
from headrace.kv.manager import KvManager, Tables
from headrace.kv.rows import TokenRun, batch_of_runs, move_slots
from headrace.logit_ops import Expand, SamplerState, StepResult
from headrace.proposer import Pays, ProposerTraits, SequenceView, always_pays
from headrace.record import frozen
from headrace.speculation.proposers.chains import ACCEPTANCE, TIME_LIMIT, Chain, chain, grow
from headrace.speculation.proposers.dynamic_tree import GrowingTree, grow_trees
from headrace.speculation.proposers.trees import merge

_CATCH_UP_ROWS = 512
"""Max known tokens in one step."""


def max_rows(nodes: int) -> int:
    """Max slots that a draft of `nodes` tokens reserves at once."""
    return _CATCH_UP_ROWS + nodes - 1


class DraftText(Protocol):
    """A sequence in tokens of the draft model, which grows with the sequence."""

    ids: list[int]
    num_read: int
    """Tokens of the sequence that it has read."""

    @property
    def is_whole(self) -> bool:
        """Whether `ids` spell the text up to its end."""

    def read(self, known: Sequence[int]) -> None:
        """Read the tokens of the sequence that follow those already read."""

    def translated(self, drafted: Sequence[int]) -> list[int]:
        """Cut drafted tokens into tokens of the target."""

    def clone(self) -> Self:
        """Return an independent text with the same tokens."""


@frozen(eq=False)
class OtherVocabulary:
    """The vocabulary of a draft model with another tokenizer than the target's."""

    new_text: Callable[[], DraftText]
    lookbehind: int
    """Last tokens of a text that further tokens may change."""
    sampler: SamplerState
    """Takes the likeliest token of the draft model."""
    target_ids: Ints
    """The target's token for each token of the draft model, or -1: [draft vocab]."""
    own_ids: Ints | None
    """The draft model's token for each token of the target, or -1: [vocab]. None: the vocabularies
    share too few tokens, so drafts are translated by their text.
    """


@dataclass(slots=True, eq=False)
class _DraftContext:
    tables: Tables
    tokens: list[int] = field(default_factory=list)
    agreed: int = 0
    """Tokens that are known to equal the sequence's."""
    text: DraftText | None = None
    """The sequence in another vocabulary."""
    first_text: DraftText | None = None
    """A clone of the text when the sequence began, for siblings."""

    def read(self, seq: SequenceView) -> list[int]:
        """The tokens of a sequence in the vocabulary of the draft model."""
        if self.text is None:
            return seq.known
        self.text.read(seq.known)
        if self.first_text is None:
            self.first_text = self.text.clone()
        return self.text.ids

    def rewind(self, known: list[int], kv: KvManager, lookbehind: int) -> None:
        """Drop the tokens that differ from `known`, and its last token, whose row gives logits.

        The last `lookbehind` tokens that agreed are compared again. Drop all if a window has freed
        KV that the next row reads.
        """
        first = max(0, self.agreed - lookbehind)
        self.agreed = first + _num_common(self.tokens[first:], known[first:-1])
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
        vocabulary: OtherVocabulary | None = None,
    ) -> None:
        """`vocabulary` is that of a draft model with another tokenizer than the target's."""
        self.traits = ProposerTraits(
            depth * width,
            width,
            in_engine_thread=True,
            time_limit=TIME_LIMIT,
            acceptance=ACCEPTANCE,
        )
        self.kv = kv
        self._executable = executable
        self._max_length = max_length
        self._depth = depth
        self._probabilities = probabilities
        self._vocabulary = vocabulary
        self._lookbehind = vocabulary.lookbehind if vocabulary else 0
        self._mapped: MappedLogits | None = None
        if vocabulary and vocabulary.own_ids is not None:
            vocab_size = len(vocabulary.own_ids)
            self._mapped = MappedLogits(executable, vocabulary.target_ids, vocab_size)
        self._contexts: WeakKeyDictionary[SequenceView, _DraftContext] = WeakKeyDictionary()

    def propose(
        self, seqs: list[SequenceView], budgets: list[int], pays: Pays = always_pays
    ) -> list[DraftTree]:
        chains: dict[int, Chain] = {}
        trees: dict[int, GrowingTree] = {}
        num_slots = (self._depth - 1) * self.traits.width
        catching_up: list[tuple[_DraftContext, TokenRun]] = []
        rows_left = _CATCH_UP_ROWS
        new_requests = set[int]()
        for i, seq in enumerate(seqs):
            context = self._contexts.get(seq) or self._new_context(seq, new_requests)
            if context is None:
                continue
            known = context.read(seq)
            max_depth = self._max_length - len(known)
            num_nodes = min(budgets[i], max_depth * self.traits.width)
            if num_nodes <= 0 or (context.text and not context.text.is_whole):
                continue

            context.rewind(known, self.kv, self._lookbehind)
            computed = context.agreed
            num_uncomputed = len(known) - computed
            num_rows = min(num_uncomputed, rows_left)
            if not num_rows or not self._reserve(context, num_rows + num_slots, seqs):
                continue
            rows_left -= num_rows
            run = TokenRun(known[computed : computed + num_rows], computed, context.tables)
            if num_rows == num_uncomputed and self._grows_trees:
                trees[i] = GrowingTree(
                    seq=seq,
                    run=run,
                    budget=num_nodes,
                    depth=min(self._depth, max_depth),
                    pays=partial(pays, i),
                )
            elif num_rows == num_uncomputed:
                chains[i] = self._chain(seq, run, num_nodes)
                chains[i].pays = partial(pays, i)
            else:
                catching_up.append((context, run))

        self._catch_up(catching_up)
        width, block_size = self.traits.width, self.kv.block_size
        grow(self._launch, list(chains.values()), width, block_size)
        drafts = {i: self._draft(seqs[i], grown, budgets[i]) for i, grown in chains.items()}
        grow_trees(list(trees.values()), width, block_size, self._launch_tree, self._launch_tree)
        for i, tree in trees.items():
            self._contexts[seqs[i]].tokens[:] = seqs[i].known
            drafts[i] = tree.draft
        return [drafts.get(i, NO_DRAFT) for i in range(len(seqs))]

    @property
    def _grows_trees(self) -> bool:
        """A draft in another vocabulary is a chain with siblings, whose text is cut again."""
        return self.traits.width > 1 and self._vocabulary is None

    def _launch_tree(
        self, batch: RaggedBatch, ops: Sequence[Expand], trees: Sequence[GrowingTree]
    ) -> StepResult:
        return self._executable.launch(batch, ops).wait()

    def _launch(
        self, batch: RaggedBatch, ops: Sequence[Expand], chains: Sequence[Chain]
    ) -> StepResult:
        if self._mapped is None:
            return self._executable.launch(batch, ops).wait()
        by_text = [each.own_ids is None for each in chains]
        mapped = [op for op, own in zip(ops, by_text, strict=True) if not own]
        own_ops = [op for op, own in zip(ops, by_text, strict=True) if own]
        values = self._mapped.launch(batch, mapped, own_ops).values
        mapped_values, own_values = iter(values[: len(mapped)]), iter(values[len(mapped) :])
        return StepResult([next(own_values if own else mapped_values) for own in by_text])

    def _chain(self, seq: SequenceView, run: TokenRun, budget: int) -> Chain:
        vocabulary = self._vocabulary
        by_text = vocabulary is not None and (
            vocabulary.own_ids is None or (seq.is_greedy and seq.constraint is None)
        )
        if vocabulary and by_text:
            return Chain(
                run=run,
                seq_index=0,
                sampler=vocabulary.sampler.clone(0),
                position=0,
                budget=budget,
                probabilities=None,
            )
        grown = chain(seq, run.computed, run.tables, budget, probabilities=self._probabilities)
        grown.run = run
        grown.own_ids = vocabulary.own_ids if vocabulary else None
        return grown

    def _draft(self, seq: SequenceView, grown: Chain, budget: int) -> DraftTree:
        """Note the tokens that have KV, and return the draft in tokens of the target."""
        context, path = self._contexts[seq], grown.path[:-1]  # the last token has no KV
        if grown.own_ids is not None:
            path = [int(token) for token in grown.own_ids[path]]
        if context.text is None:
            context.tokens[:] = seq.known + path
            return grown.draft
        context.tokens[:] = context.text.ids + path
        if grown.own_ids is not None:
            return grown.draft
        paths = [context.text.translated(tokens) for tokens in grown.paths]
        return merge(paths, budget)

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
        siblings = {
            other: each for other, each in self._contexts.items() if other.seq_id[0] == request
        }
        text = self._new_text(seq, siblings)
        if siblings:
            known = text.ids if text else seq.known
            num_common = {
                other: _num_common(each.tokens, known) for other, each in siblings.items()
            }
            best = max(siblings, key=lambda other: num_common[other])
            tables = self.kv.fork(siblings[best].tables)
            context = _DraftContext(tables, siblings[best].tokens[: num_common[best]], text=text)
        else:
            context = _DraftContext(self.kv.new_tables(), text=text)
            new_requests.add(request)
        self._contexts[seq] = context
        finalize(seq, self.kv.free, context.tables).atexit = False
        return context

    def _new_text(
        self, seq: SequenceView, siblings: dict[SequenceView, _DraftContext]
    ) -> DraftText | None:
        """A text that has read the sequence, if the draft model has another vocabulary."""
        if self._vocabulary is None:
            return None
        text = self._vocabulary.new_text()
        for other, sibling in siblings.items():
            begun = sibling.first_text
            if begun and other.known[: begun.num_read] == seq.known[: begun.num_read]:
                text = begun.clone()
                break
        text.read(seq.known)
        return text

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
