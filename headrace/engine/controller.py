"""The controller of adaptive speculation: drafts run with as many nodes as give the most tokens per second, which is often none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from headrace.batch import DraftTree
from headrace.engine.acceptance import AcceptanceRates, place
from headrace.engine.sequence import Sequence
from headrace.engine.step_cost import StepCost
from headrace.proposer import ProposerTraits

_OVERHEAD_SHARE = 0.004
"""Share of all time that the overhead of speculation may take beyond the time that drafts are known to have saved."""
_MAX_SAVINGS = 2
"""Most that the account may hold, in durations of the last step."""
_MAX_DEBT = 0.1
"""Most that the account may owe, in durations of the last step, beyond the usual price of what was asked: time above that was taken by
other processes on the machine."""
_RESERVE = 0.0001
"""Seconds that the account must hold before a rest ends. Without a reserve, rests would be short and frequent, and would break up
multi-step decoding."""
_CREDIT = 0.02
"""Seconds in the account of a new engine, so that its first answer may have drafts."""
_LOOK_SHARE = 0.005
"""Share of a sequence's decoding time for asking a proposer that is not expected to pay, to see whether it would now."""
_TRIAL_SHARE = 0.005
"""Share of all time for trials: draft rows that are not expected to pay, for proposers that learn only from their rows."""
_TRIAL_STEPS = 6
"""Steps in a row of a trial; it begins when the time of all of them has been saved."""
_TRIAL_NODES = 4
"""Most draft nodes in a step of a trial, unless the draft is indivisible."""
_PLAIN_SHARE = 0.015
"""Throughput given up for plain steps, as a share of that of plain decoding. They show what a plain step costs now, and come more
often where drafts gain less."""
_PLAIN_EVERY = (6, 64)
"""Fewest and most steps with drafts after which one is plain."""
_FIRST_PLAIN = 3
"""Plain steps of about the same number of rows that are measured before the first draft."""
_VISITS_SPAN = 2
"""Steps with drafts before the next plain one are at most so many times the plain ones measured so far: the first come close together."""
_MARGIN = 1.05
"""Tokens per second, in those of plain decoding, below which drafts do not run: the estimates are no better than that, and more tokens
in a step are more work between steps."""
_WORTH_AT_FIRST = 0.5
"""Tokens that a proposer is expected to gain before its first draft."""
_RISE_RATE, _FALL_RATE, _METHOD_RATE = 0.5, 0.2, 0.05
"""Weight of the newest draft in the moving averages of gains: of a sequence where it is above the average, of a sequence where it is
below, and of all sequences."""
_PRICE_RATE, _MAX_PRICE_RISE = 0.1, 4
"""Weight of the newest call in the moving average of a proposer's seconds, and the largest multiple of that average that counts: a
longer call was interrupted."""


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
    worth: float
    """Tokens that a draft gains, less the cost of its rows in tokens: a moving average."""
    look_at: float = 0.0
    """Seconds of steps, as `Controller._now`, from which the proposer is asked again even if it is not expected to pay."""


@dataclass
class _Method:
    """What is known of one proposer."""

    traits: ProposerTraits
    acceptance: AcceptanceRates = field(default_factory=AcceptanceRates)
    seconds: float = 0.0
    """Seconds of asking it for one sequence and letting it observe the step: a moving average."""
    seconds_by_node: float = 0.0
    """The same seconds, for one node."""
    worth: float = _WORTH_AT_FIRST
    """The `worth` of a track, over all sequences: where new sequences start."""
    tracks: WeakKeyDictionary[Sequence, _Track] = field(default_factory=WeakKeyDictionary)


class Controller:
    """Weighs what drafts gain against what they cost. Timing decides how much is drafted, and never a token.

    The overhead of speculation has an account, in seconds. A small share of all time is paid into it, and all the time that drafts
    have saved; the time of asking for drafts, of choosing among them and of learning from the outcome is paid out of it. While the
    account is in debt, speculation rests. The draft rows themselves are not charged to it: they run where measured acceptance and
    step costs say that they pay.
    """

    def __init__(self, traits: Mapping[str, ProposerTraits]) -> None:
        self._methods = {name: _Method(each) for name, each in traits.items()}
        self._cost = StepCost()
        self._now = 0.0
        """Seconds of all steps so far."""
        self._account = _CREDIT
        self._price = 0.0
        """Usual seconds of the calls to proposers in the last step that could have drafts."""
        self._in_debt = False
        """Whether the account was overdrawn and has not been refilled up to the reserve since."""
        self._trial_seconds = 0.0
        """Seconds saved for trials."""
        self._num_trials = 0
        self._trial: tuple[int, int] | None = None
        """The `seq_id` of the sequence that has a trial in this step."""
        self._last_trial: tuple[int, int] | None = None
        """The same for the step before: its trial may go on."""
        self._num_scheduled = self._num_drawing = 1
        self._token_seconds = 0.0
        """Seconds of plain decoding for one token, in a step of as many sequences as this one."""
        self._extras = [0.0]
        """Cost of n draft rows in this step, at index n, in tokens that plain decoding gives in that time; computed as needed."""
        self._is_plain = True
        """Whether this step has no drafts, so that the cost of plain steps is measured."""
        self._num_drafting = 0
        """Steps with drafts since the last plain one."""
        self._plain_every = _PLAIN_EVERY[0]
        """Steps with drafts after which one is plain."""

    @property
    def rest(self) -> float:
        """Seconds of plain decoding until drafts may be asked for again, in which nothing is learned; 0: now."""
        return max(0.0, _RESERVE - self._account) / _OVERHEAD_SHARE if self._in_debt and self._trial is None else 0.0

    def begin(self, cost: StepCost, num_scheduled: int, num_drawing: int) -> None:
        """Begin a step of `num_scheduled` rows without drafts in which `num_drawing` sequences draw; `cost` is that of such steps."""
        self._cost, self._num_scheduled, self._num_drawing, self._extras, self._price = cost, num_scheduled, num_drawing, [0.0], 0.0
        visits = cost.visits(num_scheduled)
        self._is_plain = visits < _FIRST_PLAIN or self._num_drafting >= min(self._plain_every, _VISITS_SPAN * visits)
        self._token_seconds = cost.seconds(num_drawing) / num_drawing
        if self._is_plain:
            self._num_drafting = 0
        else:
            self._last_trial, self._trial = self._trial, None

    def asks(self, name: str, seq: Sequence, rival: DraftCandidate | None = None) -> bool:
        """Whether to ask a proposer for a draft: where it should gain more than `rival`, where it is time to look again, and in a trial."""
        if self._is_plain:
            return False
        method, track = self._methods[name], self._track(name, seq)
        worth = track.worth - (self._net(rival) if rival else 0.0)
        return worth * self._token_seconds >= method.seconds or track.look_at <= self._now or seq.seq_id == self._last_trial

    def budget(self, name: str, seq: Sequence, most: int) -> int:
        """Nodes to ask for: fewer than `most` where each depth takes the proposer time and deeper nodes are not expected to pay."""
        method = self._methods[name]
        if not method.traits.width:
            return most
        acceptance, reached, nodes = self._track(name, seq).acceptance, 1.0, 0
        while nodes < most:
            width = min(method.traits.width, most - nodes)
            rates = [acceptance.rate(place(0, nodes // method.traits.width + 1, rank)) for rank in range(width)]
            rows = self._extra((nodes + width) * self._num_drawing) - self._extra(nodes * self._num_drawing)
            price = rows / self._num_drawing + width * method.seconds_by_node / self._token_seconds
            if nodes and reached * sum(rates) < price:
                break
            nodes += width
            reached *= rates[0]
        return nodes

    def candidate(self, name: str, seq: Sequence, draft: DraftTree) -> DraftCandidate:
        """The draft with its values; it counts towards what the proposer is expected to gain."""
        method, track = self._methods[name], self._track(name, seq)
        candidate = DraftCandidate(name, draft, track.acceptance.values(draft) if draft.tokens else [])
        net = self._net(candidate)
        track.worth += (net - track.worth) * (_RISE_RATE if net > track.worth else _FALL_RATE)
        method.worth += (net - method.worth) * _METHOD_RATE
        track.look_at = self._now + method.seconds * self._num_drawing / _LOOK_SHARE
        return candidate

    def better(self, one: DraftCandidate, other: DraftCandidate) -> DraftCandidate:
        """The candidate that gains more; the first of equals."""
        return other if self._net(other) > self._net(one) else one

    def choose(self, candidates: dict[Sequence, DraftCandidate]) -> dict[Sequence, list[int]]:
        """The nodes to run of each candidate, ascending; the parent of a chosen node is chosen too."""
        num_drawing = self._num_drawing
        bundles: list[tuple[float, Sequence, list[int]]] = []
        for seq, candidate in candidates.items():
            if candidate.draft.indivisible:
                nodes = list(range(len(candidate.values)))
                bundles.append((sum(candidate.values) / len(nodes), seq, nodes))
            else:
                bundles += [(value, seq, [node]) for node, value in enumerate(candidate.values)]
        bundles.sort(key=lambda bundle: -bundle[0])  # stable: parents stay before children of the same value
        best, taken, tokens, num_nodes = _MARGIN, 0, float(num_drawing), 0
        for i, (value, _, nodes) in enumerate(bundles):
            tokens += value * len(nodes)
            num_nodes += len(nodes)
            gain = tokens / (num_drawing + self._extra(num_nodes))
            if gain > best:
                best, taken = gain, i + 1
        self._plain_every = min(max(int((best - 1) / _PLAIN_SHARE), _PLAIN_EVERY[0]), _PLAIN_EVERY[1])
        chosen: dict[Sequence, list[int]] = {}
        for _, seq, nodes in bundles[:taken]:
            chosen.setdefault(seq, []).extend(nodes)
        self._add_trial(candidates, chosen)
        self._num_drafting += bool(chosen)
        return {seq: sorted(nodes) for seq, nodes in chosen.items()}

    def spend(self, name: str, num_seqs: int, num_nodes: int, seconds: float) -> None:
        """Record the seconds of asking a proposer for `num_nodes` nodes of `num_seqs` sequences and letting it observe the step."""
        method = self._methods[name]
        if method.seconds:
            seconds = min(seconds, _MAX_PRICE_RISE * method.seconds * num_seqs)
        method.seconds += (seconds / num_seqs - method.seconds) * _PRICE_RATE
        method.seconds_by_node += (seconds / num_nodes - method.seconds_by_node) * _PRICE_RATE
        self._price += method.seconds * num_seqs

    def finish(self, seconds: float, saved: float) -> None:
        """Record the seconds of a step, and those that its drafts saved."""
        self._now += seconds
        most = _MAX_SAVINGS * seconds
        self._account = min(max(self._account, -_MAX_DEBT * seconds - self._price) + _OVERHEAD_SHARE * seconds + saved, most)
        self._in_debt &= self._account < min(_RESERVE, most)
        self._trial_seconds += _TRIAL_SHARE * seconds

    def charge(self, seconds: float) -> None:
        """Pay from the account for seconds of speculation other than those of draft rows."""
        self._account -= seconds
        self._in_debt |= self._account < 0

    def learn(self, seq: Sequence, candidate: DraftCandidate, tokens: list[int]) -> None:
        """Record which nodes of a candidate were right, by the tokens that the sequence went on with."""
        self._track(candidate.method, seq).acceptance.record(candidate.draft, tokens)

    def _add_trial(self, candidates: dict[Sequence, DraftCandidate], chosen: dict[Sequence, list[int]]) -> None:
        """Begin a trial on one more sequence, or go on with that of the step before, where enough time has been saved for it."""
        unused = [
            seq for seq, candidate in candidates.items() if seq not in chosen and self._methods[candidate.method].traits.learns_from_rows
        ]
        if not unused:
            return
        begun = [seq for seq in unused if seq.seq_id == self._last_trial]
        seq = begun[0] if begun else unused[self._num_trials % len(unused)]
        candidate = candidates[seq]
        nodes = list(range(len(candidate.values) if candidate.draft.indivisible else min(_TRIAL_NODES, len(candidate.values))))
        before = sum(map(len, chosen.values()))
        tokens = self._extra(before + len(nodes)) - self._extra(before) - sum(candidate.values[node] for node in nodes)
        seconds = max(0.0, tokens * self._token_seconds)
        if self._trial_seconds >= seconds * (1 if begun else _TRIAL_STEPS):
            self._trial_seconds = min(self._trial_seconds, seconds * _TRIAL_STEPS) - seconds
            self._trial = seq.seq_id
            self._num_trials += not begun
            chosen[seq] = nodes

    def _net(self, candidate: DraftCandidate) -> float:
        """Most tokens that a candidate gains, less the cost of its rows in tokens."""
        if candidate.draft.indivisible:
            return max(0.0, sum(candidate.values) - self._extra(len(candidate.values)))
        best = total = 0.0
        for n, value in enumerate(sorted(candidate.values, reverse=True), 1):
            total += value
            best = max(best, total - self._extra(n))
        return best

    def _extra(self, nodes: int) -> float:
        """Cost of so many draft rows in this step, in tokens of plain decoding."""
        while len(self._extras) <= nodes:
            more = self._cost.seconds(self._num_scheduled + len(self._extras)) - self._cost.seconds(self._num_scheduled)
            self._extras.append(more / self._token_seconds)
        return self._extras[nodes]

    def _track(self, name: str, seq: Sequence) -> _Track:
        method = self._methods[name]
        track = method.tracks.get(seq)
        if track is None:
            track = method.tracks[seq] = _Track(AcceptanceRates(method.acceptance), method.worth)
        return track
