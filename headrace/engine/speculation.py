"""Where the engine gets its drafts: it asks the proposers, decides how much of what they say to use, and keeps the books."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

from headrace.batch import Commit, Proposer, SequenceView, StepRows
from headrace.config import EngineConfig
from headrace.engine.controller import Controller, DraftCandidate
from headrace.engine.scheduler import ScheduledSequence
from headrace.engine.sequence import Sequence
from headrace.engine.step_cost import StepCost
from headrace.propose import Guard, prune
from headrace.request import DraftStats

_RECORD_EVERY = 0.05
"""Seconds after which the time of a step is recorded though speculation rests."""


@dataclass
class _InFlight:
    """What there is to learn from a step."""

    begun: float
    """When the engine turned to speculation."""
    asked: dict[str, dict[ScheduledSequence, int]] = field(default_factory=dict)
    """Who is to be asked, about which sequences, and for how many nodes."""
    candidates: dict[Sequence, list[DraftCandidate]] = field(default_factory=dict)
    """All that was said, whether or not it is in the step."""
    used: dict[Sequence, str] = field(default_factory=dict)
    """Whose draft is in the step."""
    seconds: dict[str, float] = field(default_factory=dict)
    """That asking took."""


class Speculation:
    """All proposers of an engine, by name, each behind its guard."""

    def __init__(
        self, proposers: Mapping[str, Proposer], config: EngineConfig, vocab_size: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.stats = {name: DraftStats() for name in proposers}
        self._guards = {name: Guard(proposer, vocab_size) for name, proposer in proposers.items()}
        self._nodes = {name: min(guard.max_nodes, config.max_draft_tokens) for name, guard in self._guards.items()}
        self._costs: defaultdict[int, StepCost] = defaultdict(StepCost)
        """By the magnitude of the number of sequences: the same rows take longer when they look back on more contexts."""
        methods = {name: (guard.needs_rows, guard.width) for name, guard in self._guards.items()}
        self._controller = Controller(methods) if config.adaptive_speculation else None
        self._clock = clock
        self._flight: _InFlight | None = None
        """None: speculation rests."""
        self._started = self._recorded = 0.0

    @property
    def rest(self) -> float:
        """Seconds from the step under way on in which nothing is drafted or learned."""
        if self._flight:
            return 0.0
        return self._controller.rest if self._guards and self._controller else inf

    @property
    def failures(self) -> int:
        """Calls of proposers that failed, and drafts that were rubbish."""
        return sum(guard.failures for guard in self._guards.values())

    def close(self) -> None:
        """Let go of the proposers, and so of the models that they draft with."""
        for guard in self._guards.values():
            guard.close()

    def ask(self, scheduled: list[ScheduledSequence]) -> dict[ScheduledSequence, int]:
        """Those to draft for, and for how many nodes."""
        controller = self._controller
        self._flight = None
        if not self._guards or (controller and controller.rest):
            return {}
        flight = self._flight = _InFlight(self._clock())
        able = {item: most for item in scheduled if (most := item.max_useful_draft) > 0}
        if controller and able:
            controller.begin(self._cost(scheduled), sum(item.num_scheduled for item in scheduled), sum(item.draws for item in scheduled))
        wanted: dict[ScheduledSequence, int] = {}
        for name, most in self._nodes.items():
            nodes = {item: min(most, useful) for item, useful in able.items()}
            if controller:
                asked = [item for item in able if controller.asks(name, item.seq)]
                nodes = {item: controller.budget(name, item.seq, nodes[item]) for item in asked}
            if nodes:
                flight.asked[name] = nodes
            for item, budget in nodes.items():
                wanted[item] = max(wanted.get(item, 0), budget)
        return wanted

    def draft(self) -> None:
        """Give each of them a draft, or none, within the room that there was."""
        if self._flight:
            self._collect(self._flight)
        self._started = self._clock()

    def observe(self, scheduled: list[ScheduledSequence], commits: list[Commit], rows: StepRows, num_rows: int, num_steps: int) -> None:
        """See what became of the step, or of so many of `num_rows` rows each."""
        if not self._guards:
            return
        controller, flight, self._flight = self._controller, self._flight, None
        ended, saved = self._clock(), 0.0
        seconds = ended - self._started
        if flight:
            saved = self._keep_books(scheduled, commits, flight)
        if flight or ended - self._recorded > _RECORD_EVERY:
            self._cost(scheduled).record(num_rows, seconds / num_steps)
            self._recorded = ended
        if controller:
            controller.finish(seconds, max(0.0, saved))
            if flight:
                controller.charge(self._started - flight.begun)
                self._learn(controller, scheduled, commits, flight)
        wakes = not controller or not controller.rest
        if wakes or (flight and flight.asked):
            self._tell(scheduled, commits, rows, flight)
        if controller and (wakes or flight):  # a rest that paid for itself would be cut into pieces
            controller.charge(self._clock() - ended)

    def _cost(self, scheduled: list[ScheduledSequence]) -> StepCost:
        return self._costs[len(scheduled).bit_length()]

    def _collect(self, flight: _InFlight) -> None:
        """Ask, and choose from what was said."""
        controller = self._controller
        best: dict[Sequence, DraftCandidate] = {}
        budgets: dict[Sequence, ScheduledSequence] = {}
        for name, nodes in flight.asked.items():
            asked = [item for item in nodes if item.budget]
            if controller and best:
                asked = [item for item in asked if item.seq not in best or controller.asks(name, item.seq, best[item.seq])]
            flight.asked[name] = {item: nodes[item] for item in asked}
            if not asked:
                continue
            start = self._clock()
            drafts = self._guards[name].propose([item.seq for item in asked], [min(item.budget, nodes[item]) for item in asked])
            flight.seconds[name] = self._clock() - start
            for item, draft in zip(asked, drafts, strict=True):
                seq = item.seq
                candidate = controller.candidate(name, seq, draft) if controller else DraftCandidate(name, draft, [])
                if draft.tokens:
                    budgets[seq] = item
                    flight.candidates.setdefault(seq, []).append(candidate)
                    rival = best.get(seq, candidate)
                    best[seq] = controller.better(rival, candidate) if controller else max(rival, candidate, key=_num_nodes)
        chosen = controller.choose(best) if controller and best else {b: list(range(len(o.draft.tokens))) for b, o in best.items()}
        for seq, kept in chosen.items():
            budgets[seq].draft = prune(best[seq].draft, kept)
            flight.used[seq] = best[seq].method

    def _learn(self, controller: Controller, scheduled: list[ScheduledSequence], commits: list[Commit], flight: _InFlight) -> None:
        """See which of all that was said was right."""
        for commit in commits if flight.candidates else ():
            seq = scheduled[commit.source].seq
            for candidate in flight.candidates.get(seq, ()):
                controller.learn(seq, candidate, commit.tokens)

    def _tell(self, scheduled: list[ScheduledSequence], commits: list[Commit], rows: StepRows, flight: _InFlight | None) -> None:
        """Let the proposers see what became of the step."""
        seqs: list[SequenceView] = [item.seq for item in scheduled]
        seen = [Commit(*commit[:4], scheduled[commit.source].first_draw, scheduled[commit.source].draft) for commit in commits]
        for name, guard in self._guards.items():
            start = self._clock()
            guard.observe(seqs, seen, rows)
            if self._controller and flight and name in flight.seconds:
                nodes = flight.asked[name]
                self._controller.spend(name, len(nodes), sum(nodes.values()), flight.seconds[name] + self._clock() - start)

    def _keep_books(self, scheduled: list[ScheduledSequence], commits: list[Commit], flight: _InFlight) -> float:
        """Count, and estimate the seconds saved: those of the steps that accepted tokens spare, less those of draft rows."""
        if not flight.used:
            return 0.0
        cost, num_scheduled = self._cost(scheduled), sum(item.num_scheduled for item in scheduled)
        num_drawing = sum(item.draws for item in scheduled)
        num_nodes = sum(len(item.draft.tokens) for item in scheduled)
        token = cost.seconds(num_drawing) / num_drawing
        row = (cost.seconds(num_scheduled + num_nodes) - cost.seconds(num_scheduled)) / num_nodes
        accepted = {commit.source: len(commit.path) for commit in commits}
        total = 0.0
        for source, item in enumerate(scheduled):
            if item.draft.tokens:
                name, right, nodes = flight.used[item.seq], accepted.get(source, 0), len(item.draft.tokens)
                saved = right * token - nodes * row
                asking = flight.seconds[name] / len(flight.asked[name])
                news = DraftStats(1, nodes, right, saved - asking)
                self.stats[name] = self.stats[name].plus(news)
                request = item.seq.request
                request.drafts[name] = request.drafts.get(name, DraftStats()).plus(news)
                total += saved
        return total


def _num_nodes(candidate: DraftCandidate) -> int:
    return len(candidate.draft.tokens)
