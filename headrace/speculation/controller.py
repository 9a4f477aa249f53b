"""The controller of adaptive speculation: drafts run with as many nodes as give the most tokens per
second, which is often none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from headrace.batch import DraftTree
from headrace.engine.sequence import Sequence
from headrace.proposer import ProposerTraits
from headrace.speculation.acceptance import AcceptanceRates, place
from headrace.speculation.step_cost import StepCost

_MOST_LOOKING, _LEAST_LOOKING = 0.05, 0.0025
"""Share of a sequence's time for asking a proposer whose drafts do not pay: it halves with each
such draft, from the one to the other.
"""
_MOST_REST = 0.1
"""Most seconds of rest: a new sequence may come at any time."""
_FIRST_LOOK = 0.01
"""Seconds of the first look at a sequence for each of its tokens, in times of a decoded one, up to
which every new sequence has one.
"""
_TRIAL_STEPS = 6
"""Steps in a row that a look takes where a proposer learns from its rows, which run though they are
not expected to pay.
"""
_TRIAL_NODES = 4
"""Most draft nodes in such a step, unless the draft is indivisible."""
_FIRST_PLAIN = 2
"""Plain steps of about the same number of rows that are measured before the first draft."""
_PLAIN_EVERY = 32
"""Steps with drafts after which one is plain, to measure what plain steps cost now."""
_ROW_MARGIN, _SHARED_ROW_MARGIN, _STEP_MARGIN = 1.25, 1.5, 0.05
"""Draft rows count as if they took so many times what is estimated, the second where several
sequences draw, since a draft is for one of them and delays all; and a step with drafts as if it
took so many tokens' time more. The estimates are no better than that.
"""
_PRICE_RATE, _MAX_PRICE_RISE = 0.1, 4
"""Weight of the newest call in the moving average of a proposer's seconds, and the largest multiple
of that average that counts: a longer call was interrupted.
"""


class DraftCandidate(NamedTuple):
    """A draft that could run for a sequence in the step."""

    method: str
    """Name of the proposer."""
    draft: DraftTree
    values: list[float]
    """Probability of each node that it is accepted."""


@dataclass
class _Track:
    """What is known of one proposer on one sequence."""

    acceptance: AcceptanceRates
    gain: float = 0.0
    """Tokens that its last draft would gain, less the cost of its rows in tokens; nothing if it
    would not.
    """
    is_new: bool = True
    """Whether its price is that of a first look, for which a proposer may have to read the prompt.
    """
    num_looks: int = 0
    """Drafts in a row that did not pay."""
    share: float = _MOST_LOOKING
    """Of the sequence's time, for looking."""
    look_at: float = 0.0
    """Seconds of steps, as `Controller._now`, from which the proposer is asked again even if its
    last draft did not pay.
    """


@dataclass
class _Method:
    """What is known of one proposer."""

    traits: ProposerTraits
    acceptance: AcceptanceRates
    first_seconds: float = 0.0
    """Seconds of asking it for the first time for a sequence, for each token of that: a moving
    average.
    """
    seconds: float = 0.0
    """Seconds of asking it again for one sequence and letting it observe the step: a moving
    average.
    """
    seconds_by_node: float = 0.0
    """The same seconds, for one node."""
    last: _Track | None = None
    """The track of the sequence that it was last asked for."""
    tracks: WeakKeyDictionary[Sequence, _Track] = field(default_factory=WeakKeyDictionary)


class Controller:
    """Weighs what drafts gain against what they cost. Timing decides how much is drafted, and never
    a token.

    A proposer is asked in every step while its drafts pay. Where one does not, the next look is so
    much later that looks take a small share of the time, and while none is due, speculation rests.
    The draft nodes of all sequences are put into the step from the likeliest on, as long as that
    gives more tokens per second.
    """

    def __init__(self, traits: Mapping[str, ProposerTraits]) -> None:
        self._methods = {
            name: _Method(each, AcceptanceRates(prior=each.acceptance))
            for name, each in traits.items()
        }
        self._cost = StepCost()
        self._now = 0.0
        """Seconds of all steps so far."""
        self._looks: dict[tuple[str, tuple[int, int]] | None, float] = {None: 0.0}
        """When to ask again, as `_now`, by proposer and `seq_id` in this step; at None, when in any
        case.
        """
        self._num_scheduled = self._num_drawing = 1
        self._token_seconds = 0.0
        """Seconds of plain decoding for one token, in a step of as many sequences as this one."""
        self._row_costs = [0.0]
        """Cost of n draft rows in this step, at index n, in tokens that plain decoding gives in
        that time; computed as needed.
        """
        self._is_plain = True
        """Whether this step has no drafts, so that the cost of plain steps is measured."""
        self._num_drafting = 0
        """Steps with drafts since the last plain one."""

    @property
    def rest(self) -> float:
        """Seconds of plain decoding until drafts may be asked for again; 0: now."""
        return max(0.0, min(self._looks.values()) - self._now)

    def begin(self, cost: StepCost, num_scheduled: int, num_drawing: int) -> None:
        """Begin a step of `num_scheduled` rows without drafts in which `num_drawing` sequences
        draw; `cost` is that of such steps.
        """
        self._cost, self._num_scheduled, self._num_drawing, self._row_costs = (
            cost,
            num_scheduled,
            num_drawing,
            [0.0],
        )
        self._is_plain = (
            cost.visits(num_scheduled) < _FIRST_PLAIN or self._num_drafting >= _PLAIN_EVERY
        )
        self._token_seconds = cost.seconds(num_drawing) / num_drawing
        self._looks = {None: self._now if self._is_plain else self._now + _MOST_REST}
        if self._is_plain:
            self._num_drafting = 0

    def asks(self, name: str, seq: Sequence, rival: DraftCandidate | None = None) -> bool:
        """Whether to ask a proposer for a draft: where it should gain more than `rival`, and where
        it is time to look again.
        """
        if self._is_plain:
            return False
        method, track = self._methods[name], self._track(name, seq)
        pays, look_at = track.gain * self._token_seconds > method.seconds, track.look_at
        # Where it is asked but granted no draft budget, it is asked again in the next step.
        self._looks[name, seq.seq_id] = self._now if pays else look_at
        if pays and rival:
            pays = (track.gain - self._gain(rival)) * self._token_seconds > method.seconds
            look_at += self._look_seconds(method) * self._num_drawing / _MOST_LOOKING
        return pays or look_at <= self._now

    def budget(self, name: str, seq: Sequence, most: int) -> int:
        """Nodes to ask for: fewer than `most` where each depth takes the proposer time and deeper
        nodes are not expected to pay.
        """
        method = self._methods[name]
        if not method.traits.width:
            return most
        acceptance, reached, nodes = self._track(name, seq).acceptance, 1.0, 0
        while nodes < most:
            width = min(method.traits.width, most - nodes)
            rates = [
                acceptance.rate(place(0, nodes // method.traits.width + 1, rank))
                for rank in range(width)
            ]
            rows = self._row_cost((nodes + width) * self._num_drawing) - self._row_cost(
                nodes * self._num_drawing
            )
            price = rows / self._num_drawing + width * method.seconds_by_node / self._token_seconds
            if nodes and reached * sum(rates) < price:
                break
            nodes += width
            reached *= rates[0]
        return nodes

    def candidate(self, name: str, seq: Sequence, draft: DraftTree) -> DraftCandidate:
        """The draft with its values. What it would gain decides when the proposer is asked
        again.
        """
        method, track = self._methods[name], self._track(name, seq)
        candidate = DraftCandidate(name, draft, track.acceptance.values(draft))
        track.gain = self._gain(candidate)
        if track.gain * self._token_seconds > method.seconds:
            track.num_looks, track.share, track.look_at = 0, _MOST_LOOKING, self._now
        else:
            track.num_looks += 1
            if track.num_looks % self._steps_of_look(method) == 0:
                track.look_at = (
                    self._now + self._look_seconds(method) * self._num_drawing / track.share
                )
                track.share = max(track.share / 2, _LEAST_LOOKING)
        self._looks[name, seq.seq_id] = track.look_at
        method.last = track
        return candidate

    def better(self, one: DraftCandidate, other: DraftCandidate) -> DraftCandidate:
        """The candidate that gains more; the first of equals."""
        return other if self._gain(other) > self._gain(one) else one

    def choose(self, candidates: dict[Sequence, DraftCandidate]) -> dict[Sequence, list[int]]:
        """The nodes to run of each candidate, ascending; the parent of a chosen node is
        chosen too.
        """
        bundles: list[tuple[float, Sequence, list[int]]] = []
        for seq, candidate in candidates.items():
            if candidate.draft.indivisible:
                nodes = list(range(len(candidate.values)))
                bundles.append((sum(candidate.values) / len(nodes), seq, nodes))
            else:
                bundles += [(value, seq, [node]) for node, value in enumerate(candidate.values)]
        bundles.sort(
            key=lambda bundle: -bundle[0]
        )  # stable: parents stay before children of the same value
        best, taken, tokens, num_nodes = 1.0, 0, float(self._num_drawing), 0
        for i, (value, _, nodes) in enumerate(bundles):
            tokens += value * len(nodes)
            num_nodes += len(nodes)
            gain = tokens / (self._num_drawing + self._row_cost(num_nodes))
            if gain > best:
                best, taken = gain, i + 1
        chosen: dict[Sequence, list[int]] = {}
        for _, seq, nodes in bundles[:taken]:
            chosen.setdefault(seq, []).extend(nodes)
        self._add_trial(candidates, chosen)
        self._num_drafting += bool(chosen)
        return {seq: sorted(nodes) for seq, nodes in chosen.items()}

    def spend(self, name: str, nodes: Mapping[Sequence, int], seconds: float) -> None:
        """Record the seconds of asking a proposer for so many nodes of each sequence and letting it
        observe the step.
        """
        method = self._methods[name]
        fresh = [(seq, track) for seq in nodes if (track := self._track(name, seq)).is_new]
        if fresh:
            price = seconds / sum(len(seq.known) for seq, _ in fresh)
            method.first_seconds += (price - method.first_seconds) * (
                _PRICE_RATE if method.first_seconds else 1
            )
            for _, track in fresh:
                track.is_new = False
            return
        if method.seconds:
            seconds = min(seconds, _MAX_PRICE_RISE * method.seconds * len(nodes))
        method.seconds += (seconds / len(nodes) - method.seconds) * _PRICE_RATE
        method.seconds_by_node += (
            seconds / sum(nodes.values()) - method.seconds_by_node
        ) * _PRICE_RATE

    def finish(self, seconds: float) -> None:
        """Record the seconds of a step."""
        self._now += seconds

    def learn(self, seq: Sequence, candidate: DraftCandidate, tokens: list[int]) -> None:
        """Record which nodes of a candidate were right, by the tokens that the sequence went on
        with.
        """
        self._track(candidate.method, seq).acceptance.record(candidate.draft, tokens)

    def _add_trial(
        self, candidates: dict[Sequence, DraftCandidate], chosen: dict[Sequence, list[int]]
    ) -> None:
        """Run a few nodes for one more sequence, if its proposer was asked and learns from its rows
        only.
        """
        for seq, candidate in candidates.items():
            if seq not in chosen and self._methods[candidate.method].traits.learns_from_rows:
                num_nodes = len(candidate.values)
                chosen[seq] = list(
                    range(
                        num_nodes if candidate.draft.indivisible else min(_TRIAL_NODES, num_nodes)
                    )
                )
                return

    def _steps_of_look(self, method: _Method) -> int:
        return _TRIAL_STEPS if method.traits.learns_from_rows else 1

    def _look_seconds(self, method: _Method) -> float:
        """Price of a look at one sequence."""
        if not method.traits.learns_from_rows:
            return method.seconds
        return _TRIAL_STEPS * (method.seconds + self._row_cost(_TRIAL_NODES) * self._token_seconds)

    def _gain(self, candidate: DraftCandidate) -> float:
        """Most tokens that a candidate gains, less the cost of its rows in tokens."""
        if candidate.draft.indivisible:
            return max(0.0, sum(candidate.values) - self._row_cost(len(candidate.values)))
        best = total = 0.0
        for n, value in enumerate(sorted(candidate.values, reverse=True), 1):
            total += value
            best = max(best, total - self._row_cost(n))
        return best

    def _row_cost(self, nodes: int) -> float:
        """Cost of so many draft rows in this step, in tokens of plain decoding, with the
        margins.
        """
        while len(self._row_costs) <= nodes:
            more = self._cost.seconds(
                self._num_scheduled + len(self._row_costs)
            ) - self._cost.seconds(self._num_scheduled)
            margin = _ROW_MARGIN if self._num_drawing == 1 else _SHARED_ROW_MARGIN
            self._row_costs.append(_STEP_MARGIN + margin * more / self._token_seconds)
        return self._row_costs[nodes]

    def _track(self, name: str, seq: Sequence) -> _Track:
        """What is known of a proposer on a sequence; a first look that takes long waits as long as
        the next one at the last sequence.
        """
        method = self._methods[name]
        track = method.tracks.get(seq)
        if track is None:
            track = method.tracks[seq] = _Track(AcceptanceRates(method.acceptance))
            is_quick = (
                method.first_seconds <= _FIRST_LOOK * self._token_seconds
                and not method.traits.learns_from_rows
            )
            if method.last and not is_quick:
                track.gain, track.share, track.look_at = (
                    method.last.gain,
                    method.last.share,
                    method.last.look_at,
                )
        return track
