"""Speculative decoding in the engine: asks the proposers, chooses which of their drafts run, and
counts what that gained.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.config import EngineConfig
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.sequence import Sequence
from headrace.logit_ops import StepResult
from headrace.proposer import Proposer, SequenceView
from headrace.request import DraftStats
from headrace.speculation.controller import Controller, DraftCandidate
from headrace.speculation.proposers import Guard, prune
from headrace.speculation.step_cost import StepCost

_RECORD_EVERY = 0.05
"""Seconds after which the time of a step is recorded even if speculation rests."""


@dataclass(slots=True, eq=False)
class StepDrafts:
    """The drafts of a step, and what there is to learn from them."""

    asked: dict[str, dict[ScheduledSequence, int]] = field(default_factory=dict)
    """The sequences that each proposer is asked about, by its name, with the most nodes for each.
    """
    candidates: dict[Sequence, list[DraftCandidate]] = field(default_factory=dict)
    """All drafts that were proposed, whether or not they run."""
    used: dict[Sequence, str] = field(default_factory=dict)
    """Name of the proposer whose draft runs, for each sequence that has one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that asking each proposer and weighing its drafts took."""


class Speculation:
    """All proposers of an engine, by name, each behind its guard. `clock` gives seconds."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        config: EngineConfig,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.stats = {name: DraftStats() for name in proposers}
        self._guards = {
            name: Guard(proposer, vocab_size, clock) for name, proposer in proposers.items()
        }
        traits = {name: guard.traits for name, guard in self._guards.items()}
        self.needs_logits = any(each.needs_logits for each in traits.values())
        self.needs_hidden = any(each.needs_hidden for each in traits.values())
        self._nodes = {
            name: min(each.max_nodes, config.max_draft_tokens) for name, each in traits.items()
        }
        self._costs: defaultdict[int, StepCost] = defaultdict(StepCost)
        """Step costs by the bit length of the number of sequences: the same rows take longer when
        they attend to more contexts.
        """
        self._controller = Controller(traits) if config.adaptive_speculation else None
        self._clock = clock
        self._recorded = 0.0
        """Clock, in seconds, when the time of a step was last recorded."""

    @property
    def rest(self) -> float:
        """Seconds from now on in which nothing is drafted or learned; infinite without a
        proposer.
        """
        if not self._guards:
            return inf
        return self._controller.rest if self._controller else 0.0

    @property
    def rests(self) -> bool:
        """Whether nothing is drafted now."""
        return self.rest > 0

    @property
    def failures(self) -> int:
        """Number of calls to proposers that failed, and of drafts that were not valid."""
        return sum(guard.failures for guard in self._guards.values())

    def close(self) -> None:
        """Release the proposers, and with them the models that they draft with."""
        for guard in self._guards.values():
            guard.close()

    def ask(
        self, scheduled: list[ScheduledSequence]
    ) -> tuple[StepDrafts | None, dict[ScheduledSequence, int]]:
        """Decide which sequences to draft for, and the most nodes for each; the record is None
        while speculation rests.
        """
        controller = self._controller
        if self.rests:
            return None, {}
        drafting = StepDrafts()
        able = {
            item: most
            for item in scheduled
            if not item.certain and (most := item.max_useful_draft) > 0
        }
        if controller and able:
            controller.begin(
                self._cost(scheduled),
                sum(item.num_scheduled for item in scheduled),
                sum(item.can_sample for item in scheduled),
            )
        wanted: dict[ScheduledSequence, int] = {}
        for name, most in self._nodes.items():
            nodes = {item: min(most, useful) for item, useful in able.items()}
            if controller:
                asked = [item for item in able if controller.asks(name, item.seq)]
                nodes = {item: controller.budget(name, item.seq, nodes[item]) for item in asked}
            if nodes:
                drafting.asked[name] = nodes
            for item, budget in nodes.items():
                wanted[item] = max(wanted.get(item, 0), budget)
        return drafting, wanted

    def draft(self, drafting: StepDrafts) -> None:
        """Ask the proposers, and set the draft of each sequence for which nodes are chosen, within
        the budget that it was granted.
        """
        controller = self._controller
        granted = dict.fromkeys(
            item for nodes in drafting.asked.values() for item in nodes if item.draft_budget
        )
        best: dict[Sequence, DraftCandidate] = {}
        items: dict[Sequence, ScheduledSequence] = {}
        for name, nodes in drafting.asked.items():
            asked = [item for item in nodes if item.draft_budget]
            if controller and best:
                asked = [
                    item
                    for item in asked
                    if item.seq not in best or controller.asks(name, item.seq, best[item.seq])
                ]
            drafting.asked[name] = {item: nodes[item] for item in asked}
            if not asked:
                continue
            start = self._clock()
            drafts = self._guards[name].propose(
                [item.seq for item in asked],
                [min(item.draft_budget, nodes[item]) for item in asked],
            )
            for item, proposed in zip(asked, drafts, strict=True):
                seq, draft = item.seq, _permitted(item.seq, proposed)
                candidate = (
                    controller.candidate(name, seq, draft)
                    if controller
                    else DraftCandidate(name, draft, [])
                )
                if draft.tokens:
                    items[seq] = item
                    drafting.candidates.setdefault(seq, []).append(candidate)
                    rival = best.get(seq, candidate)
                    best[seq] = (
                        controller.better(rival, candidate)
                        if controller
                        else max(rival, candidate, key=_num_nodes)
                    )
            drafting.seconds[name] = self._clock() - start
        chosen = (
            controller.choose(best)
            if controller and best
            else {seq: list(range(_num_nodes(one))) for seq, one in best.items()}
        )
        for seq, kept in chosen.items():
            items[seq].draft = prune(best[seq].draft, kept)
            drafting.used[seq] = best[seq].method
        for item in granted:
            if not item.draft.tokens:
                item.give_back_draft_budget()

    def observe(
        self,
        scheduled: list[ScheduledSequence],
        drafting: StepDrafts | None,
        commits: list[Commit],
        result: StepResult,
        num_rows: int,
        seconds: float,
        num_launches: int,
    ) -> None:
        """Learn from a finished step, and let the proposers observe it.

        It took `seconds` for `num_launches` launches of `num_rows` rows each; `result` is that of
        the last launch.
        """
        if not self._guards:
            return
        controller, now = self._controller, self._clock()
        if drafting:
            self._count_savings(scheduled, commits, drafting)
        if drafting or now - self._recorded > _RECORD_EVERY:
            asking = sum(drafting.seconds.values()) if drafting else 0.0
            self._cost(scheduled).record(num_rows, (seconds - asking) / num_launches)
            self._recorded = now
        if controller:
            controller.finish(seconds)
            if drafting:
                self._learn(controller, scheduled, commits, drafting)
        if not self.rests or (drafting and drafting.asked):
            self._notify(scheduled, commits, result, drafting)

    def _cost(self, scheduled: list[ScheduledSequence]) -> StepCost:
        return self._costs[len(scheduled).bit_length()]

    def _learn(
        self,
        controller: Controller,
        scheduled: list[ScheduledSequence],
        commits: list[Commit],
        drafting: StepDrafts,
    ) -> None:
        """Record which nodes of all candidates were right, also of those that did not run."""
        for commit in commits:
            seq = scheduled[commit.source].seq
            for candidate in drafting.candidates.get(seq, ()):
                controller.learn(seq, candidate, commit.tokens)

    def _notify(
        self,
        scheduled: list[ScheduledSequence],
        commits: list[Commit],
        result: StepResult,
        drafting: StepDrafts | None,
    ) -> None:
        """Let the proposers observe the step, and record the time that they take."""
        seqs: list[SequenceView] = [item.seq for item in scheduled]
        items = [scheduled[commit.source] for commit in commits]
        drafts = [NO_DRAFT if item.certain else item.draft for item in items]
        seen = [
            Commit(*commit[:4], item.first_sample_row, draft)
            for commit, item, draft in zip(commits, items, drafts, strict=True)
        ]
        for name, guard in self._guards.items():
            start = self._clock()
            guard.observe(seqs, seen, result)
            if self._controller and drafting and name in drafting.seconds:
                nodes = {item.seq: most for item, most in drafting.asked[name].items()}
                self._controller.spend(name, nodes, drafting.seconds[name] + self._clock() - start)

    def _count_savings(
        self, scheduled: list[ScheduledSequence], commits: list[Commit], drafting: StepDrafts
    ) -> None:
        """Update the statistics of drafts, with the estimated seconds saved: plain decoding of the
        accepted tokens less the draft rows.
        """
        if not drafting.used:
            return
        cost, num_scheduled = self._cost(scheduled), sum(item.num_scheduled for item in scheduled)
        num_drawing = sum(item.can_sample for item in scheduled)
        num_nodes = sum(len(item.draft.tokens) for item in scheduled)
        token = cost.seconds(num_drawing) / num_drawing
        row = (cost.seconds(num_scheduled + num_nodes) - cost.seconds(num_scheduled)) / num_nodes
        accepted = {commit.source: len(commit.path) for commit in commits}
        for source, item in enumerate(scheduled):
            if item.draft.tokens and not item.certain:
                name, num_accepted, nodes = (
                    drafting.used[item.seq],
                    accepted.get(source, 0),
                    len(item.draft.tokens),
                )
                saved = num_accepted * token - nodes * row
                asking = drafting.seconds[name] / len(drafting.asked[name])
                stats = DraftStats(1, nodes, num_accepted, saved - asking)
                self.stats[name] = self.stats[name].plus(stats)
                request = item.seq.request
                request.drafts[name] = request.drafts.get(name, DraftStats()).plus(stats)


def _permitted(seq: Sequence, draft: DraftTree) -> DraftTree:
    """A draft without the nodes that the rules of its request forbid; none at all where it runs as
    a whole or not.
    """
    if seq.constraint is None or not draft.tokens:
        return draft
    kept = seq.constraint.permitted(draft)
    if not kept or (draft.indivisible and len(kept) < len(draft.tokens)):
        return NO_DRAFT
    return prune(draft, kept)


def _num_nodes(candidate: DraftCandidate) -> int:
    return len(candidate.draft.tokens)
