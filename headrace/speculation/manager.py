"""Speculation in the step loop, as a policy (`policy.py`) decides."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Protocol, TypeVar

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.config import EngineConfig
from headrace.logit_ops import StepResult
from headrace.outputs import DraftStats
from headrace.proposer import Proposer, SequenceView
from headrace.speculation.adaptive_policy import AdaptivePolicy
from headrace.speculation.guard import Guard
from headrace.speculation.policy import DraftCandidate, DraftPolicy, FixedPolicy
from headrace.speculation.proposers.trees import prune
from headrace.speculation.step_cost import StepCost

_RECORD_EVERY = 0.05
"""Interval in seconds while speculation pauses."""
_LAUNCHES_RATE = 0.1
"""Weight of the newest step in the mean number of launches."""


class ScheduledView(Protocol):
    """The part of a scheduled sequence that speculation reads, and its draft."""

    draft: DraftTree

    @property
    def seq(self) -> SequenceView: ...
    @property
    def num_scheduled(self) -> int: ...  # rows without drafts
    @property
    def can_sample(self) -> bool: ...  # whether the step samples its next token
    @property
    def forced(self) -> list[int]: ...  # tokens of a jump-forward draft, which no proposer made
    @property
    def max_useful_draft(self) -> int: ...  # nodes
    @property
    def draft_budget(self) -> int: ...  # nodes with reserved slots
    @property
    def rows(self) -> range: ...  # of its known tokens in the step
    @property
    def end(self) -> int: ...  # tokens with KV after the step
    @property
    def num_launches(self) -> int: ...
    @property
    def first_sample_row(self) -> int: ...  # logit row of the last scheduled known token
    @property
    def draft_stats(self) -> dict[str, DraftStats]: ...  # of the request, by proposer
    def give_back_draft_budget(self) -> None: ...


Item = TypeVar("Item", bound=ScheduledView)


@dataclass(slots=True, eq=False)
class StepDrafts(Generic[Item]):
    """The drafts of one step, and their measurements."""

    calls: dict[str, dict[Item, int]] = field(default_factory=dict)
    """Max nodes by proposer and sequence."""
    call_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by proposer, including the evaluation."""
    num_drafted: dict[str, dict[Item, int]] = field(default_factory=dict)
    """Drafted nodes by proposer and sequence, before any are left out."""
    candidates: dict[Item, list[DraftCandidate]] = field(default_factory=dict)
    """All drafts, whether or not they run."""
    methods: dict[Item, str] = field(default_factory=dict)
    rival_gains: dict[Item, float] = field(default_factory=dict)
    """Tokens that the best draft of another proposer should gain."""
    overhead: float = 0.0
    """Seconds of this manager in the step, without calls."""


class SpeculationManager:
    """Runs all proposers of an engine, each inside a guard. `clock` returns seconds."""

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
        self.needs_hidden = any(each.needs_hidden or each.needs_taps for each in traits.values())
        self._reads_rows = [name for name, each in traits.items() if each.needs_taps]
        self._max_nodes = {
            name: min(each.max_nodes, config.max_draft_tokens) for name, each in traits.items()
        }
        self._policy: DraftPolicy = (
            AdaptivePolicy(traits) if config.adaptive_speculation else FixedPolicy()
        )
        self._costs: defaultdict[int, StepCost] = defaultdict(StepCost)
        """Costs by bit length of the number of sequences: rows over more contexts take longer."""
        self._clock = clock
        self._last_record = 0.0
        self._plain_launches = 1.0
        """Mean launches of a step during a pause."""

    @property
    def pause_seconds(self) -> float:
        """Seconds until a step may have drafts again; infinite without a proposer."""
        return self._policy.pause_seconds if self._guards else inf

    @property
    def is_paused(self) -> bool:
        """Whether no proposer is called and none observes the step."""
        return self.pause_seconds > 0

    @property
    def failures(self) -> int:
        return sum(guard.failures for guard in self._guards.values())

    def forget(self, name: str) -> None:
        """Forget the measured acceptance of a proposer."""
        self._policy.forget(name)

    def close(self) -> None:
        for guard in self._guards.values():
            guard.close()

    def plan(self, scheduled: list[Item]) -> tuple[StepDrafts[Item] | None, dict[Item, int]]:
        """Choose the proposers to call.

        Returns the drafts, None during a pause, and the nodes to reserve slots for.
        """
        if self.is_paused:
            return None, {}
        start = self._clock()
        limits = {
            item: limit
            for item in scheduled
            if not item.forced and (limit := item.max_useful_draft) > 0
        }
        if limits:
            self._policy.begin_step(
                self._cost(scheduled),
                num_scheduled=sum(item.num_scheduled for item in scheduled),
                num_sampling=sum(item.can_sample for item in scheduled),
            )

        drafts: StepDrafts[Item] = StepDrafts()
        requested: dict[Item, int] = {}
        for name, max_nodes in self._max_nodes.items():
            nodes = {
                item: self._policy.max_nodes(name, item.seq, min(max_nodes, limit))
                for item, limit in limits.items()
                if self._policy.should_call(name, item.seq)
            }
            if nodes:
                drafts.calls[name] = nodes
            for item, num_nodes in nodes.items():
                requested[item] = max(requested.get(item, 0), num_nodes)
        drafts.overhead = self._clock() - start
        return drafts, requested

    def draft(self, drafts: StepDrafts[Item]) -> None:
        began = self._clock()
        granted = dict.fromkeys(
            item for nodes in drafts.calls.values() for item in nodes if item.draft_budget
        )
        best: dict[Item, DraftCandidate] = {}
        for name, nodes in drafts.calls.items():
            # A draft of an earlier proposer may leave nothing to gain by this one.
            items = [
                item
                for item in nodes
                if item.draft_budget
                and (item not in best or self._policy.should_call(name, item.seq, best[item]))
            ]
            drafts.calls[name] = {item: nodes[item] for item in items}
            if items:
                start = self._clock()
                self._call(name, drafts, best)
                drafts.call_seconds[name] = self._clock() - start

        if best:
            for item, chosen in self._policy.choose_nodes(best).items():
                item.draft = prune(best[item].draft, chosen)
                drafts.methods[item] = best[item].method
        for item in granted:
            if not item.draft.tokens:
                item.give_back_draft_budget()
        drafts.overhead += self._clock() - began - sum(drafts.call_seconds.values())

    def observe(
        self,
        scheduled: Sequence[Item],
        drafts: StepDrafts[Item] | None,
        commits: list[Commit],
        result: StepResult,
        num_rows: int,
        seconds: float,
        num_launches: int,
        host_seconds: float = 0.0,
    ) -> None:
        """Learn from a finished step of `num_launches` launches.

        `seconds` is the time of all launches, with `host_seconds` outside them; `result` is the
        result of the last.
        """
        if not self._guards:
            return
        now = self._clock()
        if drafts:
            self._count_savings(scheduled, commits, drafts)
        if drafts or now - self._last_record > _RECORD_EVERY:
            call_seconds = sum(drafts.call_seconds.values()) if drafts else 0.0
            self._cost(scheduled).record(num_rows, (seconds - call_seconds) / num_launches)
            self._last_record = now

        self._policy.record_step(seconds, len(scheduled))
        if drafts:
            # Drafts that did not run are measured too: the new tokens show which nodes were right.
            for commit in commits:
                item = scheduled[commit.source]
                for candidate in drafts.candidates.get(item, ()):
                    self._policy.record_acceptance(item.seq, candidate, commit.tokens)
            # Multi-step decoding would have shared the host's work between some launches.
            host_seconds -= drafts.overhead + sum(drafts.call_seconds.values())
            drafts.overhead += max(0.0, host_seconds) * (1 - 1 / self._plain_launches)
            drafts.overhead += self._clock() - now
        else:
            self._plain_launches += _LAUNCHES_RATE * (num_launches - self._plain_launches)
        if not self.is_paused or (drafts and drafts.calls):
            self._notify(list(self._guards), scheduled, commits, result, drafts)
        elif self._reads_rows and num_rows > len(scheduled):
            # Prompts are followed from their beginning, even during a pause.
            self._notify(self._reads_rows, scheduled, commits, result, drafts)

    def _cost(self, scheduled: Sequence[Item]) -> StepCost:
        return self._costs[len(scheduled).bit_length()]

    def _call(self, name: str, drafts: StepDrafts[Item], best: dict[Item, DraftCandidate]) -> None:
        nodes = drafts.calls[name]
        seqs = [item.seq for item in nodes]
        proposed = self._guards[name].propose(
            seqs,
            [min(item.draft_budget, limit) for item, limit in nodes.items()],
            lambda i, confidences: self._policy.pays_below(name, seqs[i], confidences),
        )
        num_drafted = [len(draft.tokens) for draft in proposed]
        drafts.num_drafted[name] = dict(zip(nodes, num_drafted, strict=True))
        for item, draft in zip(nodes, proposed, strict=True):
            candidate = self._policy.evaluate(name, item.seq, _permitted(item.seq, draft))
            if candidate.draft.tokens:
                drafts.candidates.setdefault(item, []).append(candidate)
                rival = best.get(item)
                best[item] = chosen = self._policy.better(rival, candidate) if rival else candidate
                if rival:
                    other = rival if chosen is candidate else candidate
                    gain = self._policy.gain(other)
                    drafts.rival_gains[item] = max(drafts.rival_gains.get(item, 0.0), gain)

    def _notify(
        self,
        names: Sequence[str],
        scheduled: Sequence[Item],
        commits: list[Commit],
        result: StepResult,
        drafts: StepDrafts[Item] | None,
    ) -> None:
        seqs: list[SequenceView] = [item.seq for item in scheduled]
        shown: dict[int, Commit] = {}
        for name in names:
            start = self._clock()
            if self._guards[name].traits.observes:
                followed = [
                    commit
                    for commit in commits
                    if name not in self._reads_rows
                    or self._policy.follows(name, scheduled[commit.source].seq)
                ]
                observed = [_shown(scheduled[each.source], each, shown) for each in followed]
                if observed or not commits:
                    self._guards[name].observe(seqs, observed, result)
            seconds = self._clock() - start
            if drafts and name in drafts.call_seconds:
                seconds += drafts.call_seconds[name] + drafts.overhead / len(drafts.call_seconds)
                nodes = {item.seq: count for item, count in drafts.num_drafted[name].items()}
                self._policy.record_call(name, nodes, seconds)
            else:
                self._policy.record_observation(name, seconds)

    def _count_savings(
        self, scheduled: Sequence[Item], commits: list[Commit], drafts: StepDrafts[Item]
    ) -> None:
        if not drafts.methods:
            return
        cost = self._cost(scheduled)
        num_scheduled = sum(item.num_scheduled for item in scheduled)
        num_sampling = sum(item.can_sample for item in scheduled)
        num_nodes = sum(len(item.draft.tokens) for item in scheduled)
        token_seconds = cost.seconds(num_sampling) / num_sampling
        draft_seconds = cost.seconds(num_scheduled + num_nodes) - cost.seconds(num_scheduled)
        row_seconds = draft_seconds / num_nodes

        num_accepted = {commit.source: len(commit.path) for commit in commits}
        for source, item in enumerate(scheduled):
            if not item.draft.tokens or item.forced:
                continue
            name, accepted = drafts.methods[item], num_accepted.get(source, 0)
            proposed = len(item.draft.tokens)
            call_seconds = drafts.call_seconds[name] / len(drafts.calls[name])
            stats = DraftStats(
                steps=1,
                proposed=proposed,
                accepted=accepted,
                seconds_saved=accepted * token_seconds - proposed * row_seconds - call_seconds,
                seconds=call_seconds,
            )
            rival_seconds = drafts.rival_gains.get(item, 0.0) * token_seconds
            self._policy.record_savings(name, stats.seconds_saved + call_seconds - rival_seconds)
            self.stats[name] = self.stats[name].plus(stats)
            item.draft_stats[name] = item.draft_stats.get(name, DraftStats()).plus(stats)


def _shown(item: ScheduledView, commit: Commit, shown: dict[int, Commit]) -> Commit:
    """The commit as proposers see it; `shown` keeps those that were made."""
    made = shown.get(id(commit))
    if made is None:
        made = shown[id(commit)] = Commit(
            source=commit.source,
            path=commit.path,
            tokens=commit.tokens,
            logprobs=commit.logprobs,
            row=item.first_sample_row,
            draft=NO_DRAFT if item.forced else item.draft,
            rows=item.rows,
            position=item.end - item.num_scheduled + item.num_launches - 1,
        )
    return made


def _permitted(seq: SequenceView, draft: DraftTree) -> DraftTree:
    """Remove forbidden nodes, or an indivisible draft with such a node."""
    if seq.constraint is None or not draft.tokens:
        return draft
    kept = seq.constraint.allowed_nodes(draft)
    if not kept or (draft.indivisible and len(kept) < len(draft.tokens)):
        return NO_DRAFT
    return prune(draft, kept)
