"""Where the engine gets its guesses: it asks the proposers, decides how much of what they say to use, and keeps the books."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

from headrace.batch import BranchView, Commit, Proposer, StepRows
from headrace.config import EngineConfig
from headrace.engine.branch import Branch
from headrace.engine.controller import Controller, Offer
from headrace.engine.scheduler import Part
from headrace.engine.step_cost import StepCost
from headrace.propose import Guard, prune
from headrace.request import GuessStats

_RECORD_EVERY = 0.05
"""Seconds after which the time of a step is recorded though guessing rests."""


@dataclass
class _Flight:
    """What there is to learn from a step."""

    begun: float
    """When the engine turned to guessing."""
    asked: dict[str, dict[Part, int]] = field(default_factory=dict)
    """Who is to be asked, about which branches, and for how many nodes."""
    offers: dict[Branch, list[Offer]] = field(default_factory=dict)
    """All that was said, whether or not it is in the step."""
    used: dict[Branch, str] = field(default_factory=dict)
    """Whose guess is in the step."""
    seconds: dict[str, float] = field(default_factory=dict)
    """That asking took."""


class Guessing:
    """All ways of guessing of an engine, by name, each behind its guard."""

    def __init__(
        self, proposers: Mapping[str, Proposer], config: EngineConfig, vocab_size: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.stats = {name: GuessStats() for name in proposers}
        self._guards = {name: Guard(proposer, vocab_size) for name, proposer in proposers.items()}
        self._nodes = {name: min(guard.max_nodes, config.max_guess_nodes) for name, guard in self._guards.items()}
        self._costs: defaultdict[int, StepCost] = defaultdict(StepCost)
        """By the magnitude of the number of branches: the same rows take longer when they look back on more contexts."""
        methods = {name: (guard.needs_rows, guard.width) for name, guard in self._guards.items()}
        self._controller = Controller(methods) if config.guess_control else None
        self._clock = clock
        self._flight: _Flight | None = None
        """None: guessing rests."""
        self._started = self._recorded = 0.0

    @property
    def rest(self) -> float:
        """Seconds from the step under way on in which nothing is guessed or learned."""
        if self._flight:
            return 0.0
        return self._controller.rest if self._guards and self._controller else inf

    @property
    def failures(self) -> int:
        """Calls of proposers that failed, and guesses that were rubbish."""
        return sum(guard.failures for guard in self._guards.values())

    def close(self) -> None:
        """Let go of the proposers, and so of the models that they guess with."""
        for guard in self._guards.values():
            guard.close()

    def ask(self, parts: list[Part]) -> dict[Part, int]:
        """Those to guess for, and for how many nodes."""
        controller = self._controller
        self._flight = None
        if not self._guards or (controller and controller.rest):
            return {}
        flight = self._flight = _Flight(self._clock())
        able = {part: most for part in parts if (most := part.most_guessed) > 0}
        if controller and able:
            controller.begin(self._cost(parts), sum(part.forced for part in parts), sum(part.draws for part in parts))
        wanted: dict[Part, int] = {}
        for name, most in self._nodes.items():
            nodes = {part: min(most, useful) for part, useful in able.items()}
            if controller:
                asked = [part for part in able if controller.asks(name, part.branch)]
                nodes = {part: controller.room(name, part.branch, nodes[part]) for part in asked}
            if nodes:
                flight.asked[name] = nodes
            for part, room in nodes.items():
                wanted[part] = max(wanted.get(part, 0), room)
        return wanted

    def guess(self) -> None:
        """Give each of them a guess, or none, within the room that there was."""
        if self._flight:
            self._collect(self._flight)
        self._started = self._clock()

    def observe(self, parts: list[Part], commits: list[Commit], rows: StepRows, num_rows: int, num_steps: int) -> None:
        """See what became of the step, or of so many of `num_rows` rows each."""
        if not self._guards:
            return
        controller, flight, self._flight = self._controller, self._flight, None
        ended, saved = self._clock(), 0.0
        seconds = ended - self._started
        if flight:
            saved = self._keep_books(parts, commits, flight)
        if flight or ended - self._recorded > _RECORD_EVERY:
            self._cost(parts).record(num_rows, seconds / num_steps)
            self._recorded = ended
        if controller:
            controller.finish(seconds, max(0.0, saved))
            if flight:
                controller.charge(self._started - flight.begun)
                self._learn(controller, parts, commits, flight)
        wakes = not controller or not controller.rest
        if wakes or (flight and flight.asked):
            self._tell(parts, commits, rows, flight)
        if controller and (wakes or flight):  # a rest that paid for itself would be cut into pieces
            controller.charge(self._clock() - ended)

    def _cost(self, parts: list[Part]) -> StepCost:
        return self._costs[len(parts).bit_length()]

    def _collect(self, flight: _Flight) -> None:
        """Ask, and choose from what was said."""
        controller = self._controller
        best: dict[Branch, Offer] = {}
        rooms: dict[Branch, Part] = {}
        for name, nodes in flight.asked.items():
            asked = [part for part in nodes if part.room]
            if controller and best:
                asked = [part for part in asked if part.branch not in best or controller.asks(name, part.branch, best[part.branch])]
            flight.asked[name] = {part: nodes[part] for part in asked}
            if not asked:
                continue
            start = self._clock()
            guesses = self._guards[name].propose([part.branch for part in asked], [min(part.room, nodes[part]) for part in asked])
            flight.seconds[name] = self._clock() - start
            for part, guess in zip(asked, guesses, strict=True):
                branch = part.branch
                offer = controller.offer(name, branch, guess) if controller else Offer(name, guess, [])
                if guess.tokens:
                    rooms[branch] = part
                    flight.offers.setdefault(branch, []).append(offer)
                    rival = best.get(branch, offer)
                    best[branch] = controller.better(rival, offer) if controller else max(rival, offer, key=_num_nodes)
        chosen = controller.choose(best) if controller and best else {b: list(range(len(o.guess.tokens))) for b, o in best.items()}
        for branch, kept in chosen.items():
            rooms[branch].guess = prune(best[branch].guess, kept)
            flight.used[branch] = best[branch].method

    def _learn(self, controller: Controller, parts: list[Part], commits: list[Commit], flight: _Flight) -> None:
        """See which of all that was said was right."""
        for commit in commits if flight.offers else ():
            branch = parts[commit.source].branch
            for offer in flight.offers.get(branch, ()):
                controller.learn(branch, offer, commit.tokens)

    def _tell(self, parts: list[Part], commits: list[Commit], rows: StepRows, flight: _Flight | None) -> None:
        """Let the proposers see what became of the step."""
        branches: list[BranchView] = [part.branch for part in parts]
        seen = [Commit(*commit[:4], parts[commit.source].first_draw, parts[commit.source].guess) for commit in commits]
        for name, guard in self._guards.items():
            start = self._clock()
            guard.observe(branches, seen, rows)
            if self._controller and flight and name in flight.seconds:
                nodes = flight.asked[name]
                self._controller.spend(name, len(nodes), sum(nodes.values()), flight.seconds[name] + self._clock() - start)

    def _keep_books(self, parts: list[Part], commits: list[Commit], flight: _Flight) -> float:
        """Count, and estimate the seconds saved: those of the steps that accepted tokens spare, less those of guess rows."""
        if not flight.used:
            return 0.0
        cost, forced = self._cost(parts), sum(part.forced for part in parts)
        num_drawing = sum(part.draws for part in parts)
        num_nodes = sum(len(part.guess.tokens) for part in parts)
        token = cost.seconds(num_drawing) / num_drawing
        row = (cost.seconds(forced + num_nodes) - cost.seconds(forced)) / num_nodes
        accepted = {commit.source: len(commit.path) for commit in commits}
        total = 0.0
        for source, part in enumerate(parts):
            if part.guess.tokens:
                name, right, nodes = flight.used[part.branch], accepted.get(source, 0), len(part.guess.tokens)
                saved = right * token - nodes * row
                asking = flight.seconds[name] / len(flight.asked[name])
                news = GuessStats(1, nodes, right, saved - asking)
                self.stats[name] = self.stats[name].plus(news)
                request = part.branch.request
                request.guesses[name] = request.guesses.get(name, GuessStats()).plus(news)
                total += saved
        return total


def _num_nodes(offer: Offer) -> int:
    return len(offer.guess.tokens)
