"""Advice: the cheapest configuration of machine, format and engine that meets a goal."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil, inf
from typing import Any

from headrace.backend_traits import KvDtype
from headrace.config import EngineConfig
from headrace.errors import MemoryLimitError, RequestError
from headrace.measure.configurations import Candidate, Search, SearchSpace, Setup
from headrace.measure.describe import kv_nll
from headrace.measure.goal import METRICS, Goal
from headrace.measure.place import THIS
from headrace.planner.quality import kv_rank
from headrace.record import frozen

_MAX_REPLICAS = 1024
_NEAREST = 8
"""Configurations whose users and context are changed for an unmet goal."""
_DEARER = 2
"""Times the fewest replicas that a search for a cost of tokens tries."""
_LEAST_SHARE = 0.1
"""Share of the users or the context below which a change is another goal."""


@frozen(kw_only=True)
class Advice:
    """The best configurations for a goal."""

    model: str
    own_format: str
    goal: Goal
    space: SearchSpace
    best: Candidate | None
    """None if no configuration meets the goal."""
    runner_up: Candidate | None
    """The best one on other devices, else in other formats, else with another batch or chunk."""
    own: Candidate | None
    """The best one in the model's own format, if the best of all is in another."""
    nearest: Candidate | None
    """For an unmet goal: the configuration that misses it by the least factor."""
    changes: dict[str, float]
    """For an unmet goal: by term, and budget, the nearest value that is met if it alone changes."""
    mode: EngineConfig
    """The lossy options of all configurations."""
    tried: int
    """Number of predicted configurations."""
    kv_nll: Mapping[str, Any]
    """The measured loss of formats of KV (`describe.kv_nll`)."""

    def kv_loss(self, dtype: KvDtype) -> str:
        """What a number format of KV costs; empty for formats of 16 bits and more."""
        if not kv_rank(dtype):
            return ""
        if dtype in self.kv_nll["percent"]:
            percent = self.kv_nll["percent"][dtype]
            return f"KV in {dtype} costs: NLL {percent:+.1f} % on {self.kv_nll['model']}"
        return f"KV in {dtype}: its loss was not measured for such keys; headrace eval measures it"


def find_advice(model: str, goal: Goal, space: SearchSpace) -> Advice:
    """Search for the best configurations.

    Raises RequestError for unknown machines or formats and a context beyond the model's,
    MemoryLimitError if the weights and one sequence fit nowhere, and the errors of
    `open_checkpoint`.
    """
    search = Search(model, space)
    if goal.context > search.max_context:
        raise RequestError(
            f"goal has context={goal.context:,}, above the model's {search.max_context:,} tokens; "
            "name a shorter context, prompt or output"
        )
    needs_price = goal.cost is not None or goal.best == "cost"
    if needs_price and all(place.price is None for place in search.places):
        names = ", ".join(dict.fromkeys(place.name for place in search.places))
        raise RequestError(
            f"goal has a cost, and {names} has no known price; add --price, or name a machine with "
            "a price"
        )
    finder = _Finder(search, goal, space.budget)
    if goal.best is None:
        finder.find_cheapest()
    else:
        finder.try_all()
    met = sorted(finder.met, key=lambda candidate: candidate.rank(goal))
    if not met and not finder.missed:
        raise _nothing_fits(search, goal)

    own = [candidate for candidate in met if candidate.setup.format == search.own_format]
    nearest = None if met else min(finder.missed, key=finder.distance)
    return Advice(
        model=model,
        own_format=search.own_format,
        goal=goal,
        space=space,
        best=met[0] if met else None,
        runner_up=_runner_up(met),
        own=own[0] if own and own[0] is not met[0] and met[0].loss.high else None,
        nearest=nearest,
        changes={} if met else finder.changes() | _needed_budget(search, goal),
        mode=search.mode,
        tried=search.tried,
        kv_nll=kv_nll(search.key_kind),
    )


def _needed_budget(search: Search, goal: Goal) -> dict[str, float]:
    """The least budget for a goal that a given one does not meet."""
    if search.space.budget is None:
        return {}
    finder = _Finder(search, replace(goal, best=None), None)
    finder.find_cheapest()
    prices = [one.price for one in finder.met if one.price is not None]
    return {"budget": min(prices)} if prices else {}


class _Finder:
    """One search for a goal, with the configurations that meet it and those that do not."""

    def __init__(self, search: Search, goal: Goal, budget: float | None) -> None:
        self._search, self._goal, self._budget = search, goal, budget
        self.met: list[Candidate] = []
        self.missed: list[Candidate] = []

    def find_cheapest(self) -> None:
        """Find the cheapest candidates of two kinds of devices, and of the model's own format.

        Each setup gets its fewest replicas: with more of them, each has fewer users, so latencies
        fall and the price rises.
        """
        own_format = self._search.own_format
        self._find_cheapest(self._search.setups(), 2)
        if not any(one.setup.format == own_format for one in self.met):
            own = (one for one in self._search.setups() if one.format == own_format)
            self._find_cheapest(own, 1)

    def _find_cheapest(self, setups: Iterable[Setup], kinds: int) -> None:
        """Find the cheapest candidates of this number of kinds of devices."""
        prices: dict[tuple[str, int], float] = {}
        for setup in setups:
            best = sorted(prices.values())[:kinds]
            found = self._fewest_replicas(setup, best[-1] if len(best) == kinds else inf)
            if found:
                self.met += found
                price = min(inf if one.price is None else one.price for one in found)
                key = setup.place.name, setup.place.mesh.ranks
                prices[key] = min(price, prices.get(key, inf))

    def _fewest_replicas(self, setup: Setup, limit: float) -> list[Candidate]:
        """The candidates that meet the goal with the fewest replicas within a price."""
        most = self._max_replicas(setup, limit)
        if not most:
            if setup.place.price is not None and limit == inf:
                self._try(setup, 1, only_first=True)  # beyond the budget
            return []
        low = self._least_replicas(setup)
        if low > most:
            self._try(setup, most, only_first=True)
            return []
        if not self._meets(setup, most):
            return []
        high = most
        while low < high:
            middle = int(low + high) // 2
            if self._meets(setup, middle):
                high = middle
            else:
                low = middle + 1
        # Tokens cost more with more replicas, unless these allow larger batches.
        last = high if self._goal.cost is None else min(most, _DEARER * high)
        tries = (self._try(setup, replicas) for replicas in range(high, last + 1))
        return next(filter(None, tries), [])

    def _meets(self, setup: Setup, replicas: int) -> bool:
        """Whether an engine meets the goal, but for the cost of tokens."""
        goal, missed = replace(self._goal, cost=None), []
        for one in self._search.candidates(goal, setup, replicas):
            if not one.misses(goal, self._budget):
                return True
            missed.append(one)
        self.missed += missed
        return False

    def try_all(self) -> None:
        """Predict all configurations, of one replica, or of all that the budget buys."""
        for setup in self._search.setups():
            replicas = 1 if self._budget is None else self._max_replicas(setup, inf)
            self.met += self._try(setup, replicas or 1)

    def _try(self, setup: Setup, replicas: int, *, only_first: bool = False) -> list[Candidate]:
        """The candidates that meet the goal. The others are kept to find changes."""
        found = list(self._search.candidates(self._goal, setup, replicas, only_first=only_first))
        met = [one for one in found if not one.misses(self._goal, self._budget)]
        if not met:
            self.missed += found
        return met

    def _least_replicas(self, setup: Setup) -> float:
        """Fewest replicas that may meet the goal: infinite, if a user alone has not its latencies.

        A replica reads a prompt at a time, and each user asks for one in TTFT and all TPOTs.
        """
        goal = self._goal
        alone = replace(goal, users=1, throughput=None, cost=None)
        one = next(self._search.candidates(alone, setup, 1, only_first=True), None)
        if one is None or one.misses(alone, None):
            return inf
        if goal.ttft is None or goal.tpot is None:
            return 1
        reading = one.steady.reading / one.steady.requests_per_second
        return max(1, ceil(goal.users * reading / (goal.ttft + (goal.output - 1) * goal.tpot)))

    def _max_replicas(self, setup: Setup, limit: float) -> int:
        """The replicas that budget and price limit allow, at most one for each user."""
        place, budget = setup.place, self._budget
        if place.name == THIS:
            return 1
        most = min(self._goal.users, _MAX_REPLICAS)
        cap = limit if budget is None else min(limit, budget)
        if cap == inf:
            return most
        if place.price is None:
            return 0
        unit = place.price * place.mesh.ranks
        return min(most, int(cap / unit * (1 + 1e-9))) if unit else most

    def distance(self, candidate: Candidate) -> float:
        """The largest factor by which a bound is missed."""
        return max(candidate.misses(self._goal, self._budget).values())

    def changes(self) -> dict[str, float]:
        """By term of the goal, the nearest value that would be met if only it changed."""
        found: dict[str, float] = {}
        for metric in METRICS:
            # Configurations that miss this bound alone.
            values = [
                one.value(metric)
                for one in self.missed
                if {*one.misses(self._goal, self._budget)} == {metric}
            ]
            nearest = (max if metric == "throughput" else min)(values, default=inf)
            if nearest < inf:
                found[metric] = nearest
        for name in ("users", "context"):
            if (value := self._largest(name)) >= _LEAST_SHARE * self._size(name):
                found[name] = value
        return found

    def _largest(self, name: str) -> int:
        """The largest number of users, or context, that one of the nearest candidates meets."""
        best = 0
        for setup, replicas in self._nearest_setups():
            low, high = best, self._size(name)
            while low + 1 < high:
                middle = (low + high) // 2
                goal = _with_size(self._goal, name, middle)
                candidates = self._search.candidates(goal, setup, min(replicas, goal.users))
                is_met = any(not one.misses(goal, self._budget) for one in candidates)
                low, high = (middle, high) if is_met else (low, middle)
            best = max(best, low)
        return best

    def _size(self, name: str) -> int:
        return self._goal.users if name == "users" else self._goal.context

    def _nearest_setups(self) -> Iterable[tuple[Setup, int]]:
        """The setups, with their replicas, of the candidates that miss the goal by the least."""
        affordable = [
            one for one in self.missed if "budget" not in one.misses(self._goal, self._budget)
        ]
        nearest = sorted(affordable, key=self.distance)
        setups = {(one.setup.key, one.replicas): (one.setup, one.replicas) for one in nearest}
        return list(setups.values())[:_NEAREST]


def _with_size(goal: Goal, name: str, size: int) -> Goal:
    """The goal with other users or another context, of which the prompt takes its share."""
    if name == "users":
        return replace(goal, users=size)
    output = min(goal.output, max(1, size // 2))
    prompt = max(1, min(goal.prompt, size - output))
    return replace(goal, context=size, prompt=prompt, output=output)


def _runner_up(met: list[Candidate]) -> Candidate | None:
    """The best of other devices, else of other formats, else with another batch or chunk."""
    if not met:
        return None
    best = met[0]
    others = [one for one in met if _devices(one) != _devices(best)]
    others = others or [one for one in met if one.setup.key != best.setup.key] or met[1:]
    return others[0] if others else None


def _devices(candidate: Candidate) -> tuple[str, int]:
    return candidate.setup.place.name, candidate.setup.place.mesh.ranks


def _nothing_fits(search: Search, goal: Goal) -> MemoryLimitError:
    """The error for weights and a sequence that fit on no devices."""
    fits = [
        (fit.weights + fit.to_run + fit.kv_per_sequence - fit.memory, setup, fit)
        for setup in search.setups()
        if (fit := search.fit(setup, goal.context))
    ]
    lacking, setup, fit = min(fits, key=lambda entry: entry[0])
    place = setup.place
    return MemoryLimitError(
        f"no machine holds the weights and a sequence of {goal.context:,} tokens; the nearest, "
        f"{place.mesh.ranks} x {place.title} with {setup.format} and {setup.kv_dtype} KV, lacks "
        f"{lacking:,} bytes of {fit.memory:,}; name other machines (--on), a smaller --format, or "
        "a shorter context"
    )
