"""The waiting and the running sequences, with their blocks and the prefix cache."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Lists
from operator import attrgetter

from headrace.config import EngineConfig
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.sequence import Request, Sequence
from headrace.engine.step_timer import StepTimer
from headrace.kv.kept import KeptPaths
from headrace.kv.manager import BlockCopy, KvManager
from headrace.kv.prefix import Hit, PrefixCache

STEPS_PER_PRIORITY = 1000
"""Steps of waiting that raise a request by one level of priority."""

_RANK = attrgetter("rank")


class SequenceQueues:
    """Sequences in order of rank. `Scheduler` decides when they move between the queues."""

    def __init__(self, kv: KvManager, config: EngineConfig) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.suspects: dict[Request, int] = {}
        """Requests of a failed step, with their numbers of tokens. A suspect runs alone until it
        gets another.
        """
        self.step_timer = StepTimer(config.target_token_ms)
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._kv = kv
        self._config = config
        self._cache = self._new_cache()
        self.kept = KeptPaths(kv)
        self._copies: list[BlockCopy] = []
        """Block copies before the next step."""
        self._num_steps = 0
        self._num_moves = 0
        self._dropped = set[Sequence]()

    def add(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            seq.request.arrival = (
                self._num_steps + STEPS_PER_PRIORITY * seq.request.options.priority
            )
            self.queue(seq)

    def queue(self, seq: Sequence) -> None:
        self._enter(self.waiting, seq)

    def drop(self, seq: Sequence) -> None:
        """Remove a sequence; its blocks are free once no launched step uses them."""
        queue = self.running if seq.tables else self.waiting
        place = bisect_left(queue, seq.rank, key=_RANK)
        if place < len(queue) and queue[place] is seq:  # else it was dropped before
            del queue[place]
        if seq.num_in_flight:
            self._dropped.add(seq)
        else:
            self._free(seq)

    def fork(self, seq: Sequence) -> list[Sequence]:
        """Start the siblings of a sequence on the same blocks; returns it and its siblings."""
        siblings, seq.siblings = seq.siblings, []
        for sibling in siblings:
            sibling.computed, sibling.settled = seq.computed, seq.settled
            sibling.node, sibling.num_admitted = seq.node, seq.num_admitted
            sibling.tables = self._kv.fork(seq.tables)
            insort(self.running, sibling, key=_RANK)
            sibling.since = seq.since
        return [seq, *siblings]

    def replace_sequences(self, seqs: list[Sequence], sources: list[Sequence]) -> list[Sequence]:
        """Replace running sequences by a successor for each source, best first; other sequences
        are freed.
        """
        num_left = Counter(sources)
        for seq in seqs:
            if seq not in num_left:
                self._free(seq)

        successors: list[Sequence] = []
        for source in sources:
            num_left[source] -= 1
            is_last = num_left[source] == 0  # the last successor is the source itself
            successor = source if is_last else source.fork(self._kv.fork(source.tables))
            successors.append(successor)
        for index, successor in enumerate(successors):
            successor.seq_id = (successor.seq_id[0], index)

        first = self.running.index(seqs[0])
        self.running[first : first + len(seqs)] = successors
        return successors

    def finish(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            seq.num_in_flight -= 1
            if not seq.num_in_flight and seq in self._dropped:
                self._dropped.remove(seq)
                self._free(seq)

    # Failed steps

    def restart(self, requests: Iterable[Request]) -> list[Request]:
        """Free all blocks after a failed step, and return the requests that it may have touched.

        If all requests wait, the admission of the first must have failed.
        """
        # Note the sequences that wait, siblings included.
        waiting = {
            sibling
            for seq in self.waiting
            for sibling in (seq, *seq.siblings)
            if not sibling.num_in_flight
        }
        started = {
            request
            for request in requests
            if any(seq not in waiting and seq.output.finish_reason is None for seq in request.seqs)
        }
        untouched = {seq.request for seq in waiting} - started
        touched = [request for request in requests if request not in untouched]
        if not touched:
            touched = [seq.request for seq in self.waiting[:1]]

        for request in touched:
            for seq in request.seqs:
                seq.tables, seq.node, seq.num_in_flight = (), None, 0
        self.waiting = [seq for seq in self.waiting if seq.request not in touched]
        self.running = []
        self._dropped = set()
        self._kv.reset()
        self._cache = self._new_cache()
        self.kept = KeptPaths(self._kv)
        return touched

    def clear_suspects(self, scheduled: list[ScheduledSequence]) -> None:
        if not self.suspects:
            return
        for item in scheduled:
            request = item.seq.request
            if request in self.suspects and request.num_tokens > self.suspects[request]:
                del self.suspects[request]

    # Moves between the queues

    def _enter(self, queue: list[Sequence], seq: Sequence) -> None:
        insort(queue, seq, key=_RANK)
        self._num_moves += 1
        seq.since = self._num_moves

    def _start(self, seq: Sequence, hit: Hit) -> None:
        self._enter(self.running, seq)
        seq.num_held_up = 0
        seq.num_admitted = len(seq.known)
        seq.tables = self._kv.new_tables()
        while self._cache is not None and not self._cache.share(hit, seq.tables):
            hit = self._match_prefix(seq)
        seq.node = hit.node
        seq.computed = seq.settled = hit.num_tokens
        self._copies += self._kv.allocate(seq.tables, seq.computed, seq.num_uncomputed) or ()

        request = seq.request
        if request.timer.start():
            request.cached_tokens = min(seq.computed, seq.prompt_len)
            self.num_prompt_tokens += seq.prompt_len
            self.num_cached_tokens += request.cached_tokens
        self.step_timer.reset()

    def _preempt(self, victim: Sequence) -> None:
        group = [seq for seq in self.running if seq.group is victim.group]
        for seq in group:
            self.running.remove(seq)
            self._free(seq)
            seq.computed = seq.settled = 0

        # Beams compute their common tokens once: the others are forked off after these.
        first, *others = group
        if others:
            first.siblings = others
            first.fork_at = _common_length(group)
        self.queue(first)
        self.num_preemptions += len(group)

    def _free(self, seq: Sequence) -> None:
        self._cache_full_blocks(seq)
        if seq.tables:
            if seq.keep and seq.output.finish_reason in ("stop", "length"):
                self._keep(seq)
            self._kv.free(seq.tables)
        seq.tables, seq.node = (), None

    # Kept paths and the prefix cache

    def release(self, names: Iterable[str]) -> None:
        """Release kept paths, also those of ended sequences that a launched step still uses."""
        released = set(names)
        for seq in self._dropped:
            if seq.keep in released:
                seq.keep = ""
        self.kept.release(released)

    def release_all(self, prefix: str) -> None:
        """Release all kept paths whose names begin with `prefix`."""
        for seq in self._dropped:
            if seq.keep.startswith(prefix):
                seq.keep = ""
        self.kept.release_all(prefix)

    def _keep(self, seq: Sequence) -> None:
        """Keep the KV of an ended sequence, up to the last token of its output."""
        node, num_tokens = seq.node, seq.prompt_len + len(seq.output.token_ids)
        num_tokens = min(num_tokens, seq.settled)
        while node is not None and node.depth * self._kv.block_size > num_tokens:
            node = node.parent
        if node is not None and num_tokens // self._kv.block_size == node.depth:
            self.kept.keep(seq.keep, node, seq.known[:num_tokens], seq.tables)

    def _new_cache(self) -> PrefixCache | None:
        return PrefixCache(self._kv) if self._config.prefix_cache else None

    def _match_prefix(self, seq: Sequence) -> Hit:
        if self._cache is None:
            return Hit(node=None, blocks=[[] for _ in self._kv.pools], num_tokens=0)
        node = self._cache.match(seq.request.scope, seq.known, seq.max_cached)
        num_tokens = node.depth * self._kv.block_size
        tail: tuple[Lists[int], int] = ((), 0)
        if self.kept:
            end = min(seq.max_cached, num_tokens + self._kv.block_size)
            tail = self.kept.find(node, seq.known[num_tokens:end])
        return Hit(
            node=node,
            blocks=self._cache.blocks(node),
            num_tokens=num_tokens + tail[1],
            tail=tail[0],
        )

    def _cache_full_blocks(self, seq: Sequence) -> None:
        node = seq.node
        if self._cache is None or node is None:
            return
        if (node.depth + 1) * self._kv.block_size <= seq.settled:
            seq.node = self._cache.insert(
                node, seq.tables, seq.known, seq.settled, replace=not seq.num_in_flight
            )


def _common_length(seqs: list[Sequence]) -> int:
    columns = zip(*(seq.known for seq in seqs), strict=True)
    return next(i for i, tokens in enumerate(columns) if len(set(tokens)) > 1)
