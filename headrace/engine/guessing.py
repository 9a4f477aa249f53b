"""Where the engine gets its guesses: it asks the proposers, decides how much of what they say to use, and keeps the books."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import NamedTuple

from headrace.batch import BranchView, Commit, Proposer, StepRows
from headrace.config import EngineConfig
from headrace.engine.branch import Branch
from headrace.engine.controller import Controller, Offer
from headrace.engine.scheduler import Part
from headrace.engine.step_cost import StepCost
from headrace.propose import Guard, prune
from headrace.request import GuessStats


class _Flight(NamedTuple):
    """What there is to learn from a step."""

    started: float
    offers: dict[Branch, list[Offer]]
    """All that was said, whether or not it is in the step."""
    used: dict[Branch, str]
    """Whose guess is in the step."""
    asked: dict[str, int]
    """For how many branches."""
    seconds: dict[str, float]
    """That asking took."""


_NOTHING = _Flight(0.0, {}, {}, {}, {})


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
        self._controller = Controller({n: guard.needs_rows for n, guard in self._guards.items()}) if config.guess_control else None
        self._clock = clock
        self._flight = _NOTHING

    @property
    def max_nodes(self) -> int:
        """Most guess nodes that a branch can use."""
        return max(self._nodes.values(), default=0)

    @property
    def failures(self) -> int:
        """Calls of proposers that failed, and guesses that were rubbish."""
        return sum(guard.failures for guard in self._guards.values())

    def close(self) -> None:
        """Let go of the proposers, and so of the models that they guess with."""
        for guard in self._guards.values():
            guard.close()

    def guess(self, parts: list[Part]) -> None:
        """Give each part that has room a guess, or none."""
        flight = _Flight(0.0, {}, {}, {}, {})
        guessing = [part for part in parts if part.room]
        if guessing and self._guards:
            self._ask(parts, guessing, flight)
        self._flight = flight._replace(started=self._clock())

    def observe(self, parts: list[Part], commits: list[Commit], rows: StepRows) -> None:
        """See what became of the step."""
        if not self._guards:
            return
        flight, self._flight = self._flight, _NOTHING
        seconds = self._clock() - flight.started
        num_rows = sum(part.forced + len(part.guess.tokens) for part in parts)
        self._keep_books(parts, commits, flight)
        self._cost(parts).record(num_rows, seconds)
        if self._controller:
            self._controller.finish(seconds)
            for commit in commits if flight.offers else ():
                branch = parts[commit.source].branch
                for offer in flight.offers.get(branch, ()):
                    self._controller.learn(branch, offer, commit.tokens)
        branches: list[BranchView] = [part.branch for part in parts]
        seen = [Commit(*commit[:4], parts[commit.source].first_draw, parts[commit.source].guess) for commit in commits]
        for name, guard in self._guards.items():
            start = self._clock()
            guard.observe(branches, seen, rows)
            if self._controller and flight.asked.get(name):
                used = sum(method == name for method in flight.used.values())
                self._controller.spend(name, flight.asked[name], self._clock() - start, used=used)

    def _cost(self, parts: list[Part]) -> StepCost:
        return self._costs[len(parts).bit_length()]

    def _ask(self, parts: list[Part], guessing: list[Part], flight: _Flight) -> None:
        controller = self._controller
        if controller:
            num_drawing = sum(part.draws for part in parts)
            controller.begin(self._cost(parts), sum(part.forced for part in parts), num_drawing)
        best: dict[Branch, Offer] = {}
        for name, guard in self._guards.items():
            asked = [part for part in guessing if not controller or controller.asks(name, part.branch, best.get(part.branch))]
            if not asked:
                continue
            start = self._clock()
            guesses = guard.propose([part.branch for part in asked], [min(part.room, self._nodes[name]) for part in asked])
            for part, guess in zip(asked, guesses, strict=True):
                branch = part.branch
                offer = controller.offer(name, branch, guess) if controller else Offer(name, guess, [])
                if guess.tokens:
                    flight.offers.setdefault(branch, []).append(offer)
                    best[branch] = controller.better(best[branch], offer) if controller and branch in best else best.get(branch, offer)
            flight.seconds[name] = self._clock() - start
            flight.asked[name] = len(asked)
        chosen = controller.choose(best, num_drawing) if controller else {b: list(range(len(o.guess.tokens))) for b, o in best.items()}
        for part in guessing:
            if nodes := chosen.get(part.branch):
                offer = best[part.branch]
                part.guess = prune(offer.guess, nodes)
                flight.used[part.branch] = offer.method
        for name, taken in flight.seconds.items():
            if controller:
                used = sum(method == name for method in flight.used.values())
                controller.spend(name, flight.asked[name], taken, used=used)

    def _keep_books(self, parts: list[Part], commits: list[Commit], flight: _Flight) -> None:
        """Count, and estimate the time saved: that of the steps which accepted tokens spare, less that of guess rows and to find them."""
        if not flight.used:
            return
        cost, forced = self._cost(parts), sum(part.forced for part in parts)
        num_drawing = sum(part.draws for part in parts)
        num_nodes = sum(len(part.guess.tokens) for part in parts)
        token = cost.seconds(num_drawing) / num_drawing
        row = (cost.seconds(forced + num_nodes) - cost.seconds(forced)) / num_nodes
        accepted = {commit.source: len(commit.path) for commit in commits}
        for source, part in enumerate(parts):
            if part.guess.tokens:
                name, right, nodes = flight.used[part.branch], accepted.get(source, 0), len(part.guess.tokens)
                asking = flight.seconds[name] / flight.asked[name]
                news = GuessStats(1, nodes, right, right * token - nodes * row - asking)
                self.stats[name] = self.stats[name].plus(news)
                request = part.branch.request
                request.guesses[name] = request.guesses.get(name, GuessStats()).plus(news)
