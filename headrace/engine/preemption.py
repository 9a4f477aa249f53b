"""Chooses the running sequences that give way to a more urgent request, or to one that they passed
(docs/internals/scheduling.md#preemption-by-priority).
"""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain, groupby
from math import ceil
from operator import attrgetter

from headrace.config import EngineConfig
from headrace.engine.sequence import Sequence
from headrace.kv.blocks import Demand
from headrace.kv.manager import KvManager
from headrace.kv.prefix import Hit

_RANK = attrgetter("rank")
_GROUP = attrgetter("group")


def demand(seq: Sequence, computed: int) -> Demand:
    return Demand(num_tokens=seq.length + 1, computed=computed, width=seq.width, common=seq.fork_at)


def max_steps(seq: Sequence, max_chunk_rows: int) -> int:
    """Steps that a sequence needs at most, if it has its rows in every step."""
    return ceil(seq.num_uncomputed / max_chunk_rows) + max(0, seq.request.limit - seq.length)


class PreemptionPolicy:
    """A preemption pays if its victims lose fewer steps than the urgent request gains.

    The victims lose the steps of their recomputation. The request gains the steps until enough
    running sequences have reached their limits.
    """

    def __init__(self, kv: KvManager, config: EngineConfig) -> None:
        self._kv = kv
        self._config = config

    def candidates(self, urgent: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Return the running sequences that may give way, in order of rank."""
        margin = self._config.priority_scheduling_preemption_threshold
        if not margin:
            return []
        later = running[bisect_right(running, urgent.rank, key=_RANK) :]
        limit = urgent.request.options.priority + margin
        return [seq for seq in later if seq.request.options.priority >= limit]

    def choose_victims(
        self,
        urgent: Sequence,
        hit: Hit,
        running: list[Sequence],
        max_width: int,
    ) -> list[Sequence]:
        """Return the last candidates in rank without which `urgent` fits; none if that does not
        pay.

        `max_width` is the max number of running sequences, forks included.
        """
        candidates = self.candidates(urgent, running)
        victims = self.fewest_victims(urgent, hit, running, candidates, max_width)
        if not victims:
            return []
        lost = ceil(self._recomputed_tokens(urgent, victims) / self._config.max_chunk_rows)
        by_end = sorted(running, key=self._max_steps)
        if lost >= self._max_steps(by_end[0]):
            # The first to end may leave too little room, so find out when there is enough.
            ends = (
                n
                for n in range(1, len(by_end) + 1)
                if self._fits_without(urgent, hit, running, by_end[:n], max_width)
            )
            if lost >= self._max_steps(by_end[next(ends, len(by_end)) - 1]):
                return []
        return victims

    def fewest_victims(
        self,
        seq: Sequence,
        hit: Hit,
        running: list[Sequence],
        candidates: list[Sequence],
        max_width: int,
    ) -> list[Sequence]:
        """Return the last candidates in rank without which a waiting sequence fits.

        None if it fits with all candidates, or without any of them.
        """

        def fits_without(groups: list[list[Sequence]]) -> bool:
            ended = list(chain.from_iterable(groups))
            return self._fits_without(seq, hit, running, ended, max_width)

        # Take whole groups, the last in rank first, and leave out the ones that are not needed.
        groups = [list(group) for _, group in groupby(reversed(candidates), key=_GROUP)]
        chosen: list[list[Sequence]] = []
        while groups and not fits_without(chosen):
            chosen.append(groups.pop(0))
        if not fits_without(chosen):
            return []
        for group in chosen[:-1]:
            others = [other for other in chosen if other is not group]
            if fits_without(others):
                chosen = others
        return list(chain.from_iterable(chosen))

    def _fits_without(
        self,
        seq: Sequence,
        hit: Hit,
        running: list[Sequence],
        ended: list[Sequence],
        max_width: int,
    ) -> bool:
        left = [other for other in running if other not in ended]
        width = sum(other.width for other in (*left, seq))
        # A sequence alone always fits.
        return width <= max_width and (not left or self.fits(seq, hit, left, ended))

    def fits(
        self, seq: Sequence, hit: Hit, running: list[Sequence], ended: Iterable[Sequence] = ()
    ) -> bool:
        """Whether there are blocks for a sequence, and a spare for each running one against
        preemption, once the blocks of `ended` are free.
        """
        return self._kv.fits(
            demand(seq, hit.num_tokens),
            hit.blocks,
            [(other.tables, demand(other, other.computed)) for other in running],
            [other.tables for other in ended],
        )

    def _max_steps(self, seq: Sequence) -> int:
        return max_steps(seq, self._config.max_chunk_rows)

    def _recomputed_tokens(self, urgent: Sequence, victims: list[Sequence]) -> int:
        """Estimate the tokens that victims compute again: at least one each.

        The prefix cache keeps their full blocks, unless `urgent` takes more than the free ones.
        """
        if not self._config.prefix_cache:
            return sum(victim.computed for victim in victims)
        block_size = self._kv.block_size
        num_full = sum(victim.settled // block_size for victim in victims)
        num_blocks = urgent.width * ceil(urgent.request.limit / block_size)
        num_evicted = min(num_full, max(0, num_blocks - self._kv.num_available))
        partial = sum(victim.computed % block_size + 1 for victim in victims)
        return partial + num_evicted * block_size
