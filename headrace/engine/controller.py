"""How much to draft: as many nodes as give the most tokens per second, which is often none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from headrace.batch import DraftTree
from headrace.engine.acceptance import AcceptanceRates, place
from headrace.engine.sequence import Sequence
from headrace.engine.step_cost import StepCost
from headrace.proposer import ProposerTraits

_SHARE = 0.004
"""Share of all time that speculation may take beyond what it is known to have saved."""
_SAVINGS = 2
"""Steps whose time is the most that can be saved up for that."""
_DEBT = 0.1
"""The same for what is owed beyond the price of what was asked last: if more, the machine was busy with something else."""
_RESERVE = 0.0001
"""Seconds of it to save up before a rest ends: else rests would be short and many, and break up steps that could run in a row."""
_CREDIT = 0.02
"""Seconds of it that a new engine begins with, so that its first answer may be drafted."""
_LOOK_SHARE = 0.005
"""Share of a sequence's time for asking where it has not paid of late, to see whether it would now."""
_TRIAL_SHARE = 0.005
"""Share of all time for rows that are not expected to pay: some proposers learn only from their rows."""
_TRIAL_STEPS = 6
"""Steps of a trial, for which time is saved before it begins."""
_TRIAL_NODES = 4
_PLAIN_SHARE = 0.015
"""Share of the gain to give up for plain steps now and then, so that it is known what they cost now; the less the gain, the more."""
_PLAIN_EVERY = (6, 64)
"""Steps after which one is plain: least and most."""
_FIRST_PLAIN = 3
"""Plain steps before the first draft."""
_VISITS_SPAN = 2
"""The first plain steps come close to each other: after so many times as many with drafts as there have been plain ones."""
_MARGIN = 1.05
"""Gain in tokens per second below which speculation is not worth it: the figures are not better than that, and more tokens a step are
more work between steps."""
_WORTH_AT_FIRST = 0.5
"""Tokens that a proposer is expected to gain before it was asked."""
_RISE, _FALL, _SLOWLY = 0.5, 0.2, 0.05
"""How quickly such expectations follow what is seen."""
_PRICE, _DEAREST = 0.1, 4
"""How quickly what it takes to ask follows what is seen, and how many times as much is the most that is believed."""


class DraftCandidate(NamedTuple):
    """A draft that a sequence could have in the step."""

    method: str
    draft: DraftTree
    values: list[float]
    """Probability of each node to be accepted."""


@dataclass
class _Track:
    """What is known of one proposer on one sequence."""

    acceptance: AcceptanceRates
    worth: float
    """Tokens that it gains when it is asked, less what its rows cost, decayed."""
    look_at: float = 0.0
    """Time to ask it again even so."""


@dataclass
class _Method:
    """What is known of one proposer."""

    traits: ProposerTraits
    acceptance: AcceptanceRates = field(default_factory=AcceptanceRates)
    seconds: float = 0.0
    """To ask it for one sequence, and let it learn; decayed."""
    seconds_by_node: float = 0.0
    worth: float = _WORTH_AT_FIRST
    """As of a sequence, of all sequences; where new ones start."""
    tracks: WeakKeyDictionary[Sequence, _Track] = field(default_factory=WeakKeyDictionary)


class Controller:
    """Weighs what drafts bring against what they cost. Timing decides how much is drafted, and never a token.

    It keeps an account of time. A small share of all time comes in, and all that drafts have saved; out goes what it takes to
    look for something to draft, to weigh it and to learn from it. While it is in debt, speculation rests. The rows of drafts are not
    in it: how often these are right decides about them.
    """

    def __init__(self, traits: Mapping[str, ProposerTraits]) -> None:
        self._methods = {name: _Method(each) for name, each in traits.items()}
        self._cost = StepCost()
        self._now = 0.0
        """Time of all steps so far."""
        self._account = _CREDIT
        self._price = 0.0
        """Of all that was asked when drafts were looked for last."""
        self._in_debt = False
        """Since the account was overdrawn it has not been filled up to the reserve."""
        self._trial_seconds = 0.0
        self._num_trials = 0
        self._tried: tuple[int, int] | None = None
        """Key of the sequence that a trial is being made on."""
        self._trying: tuple[int, int] | None = None
        """The same, before the step."""
        self._num_scheduled = self._num_drawing = 1
        self._token_seconds = 0.0
        """Of plain decoding, for one sequence of the next step."""
        self._extras = [0.0]
        """What so many draft rows cost in it, in tokens that plain decoding would give in that time; as far as was asked."""
        self._is_plain = True
        """Whether the next step is a plain one, whatever could be drafted."""
        self._num_drafting = 0
        self._plain_every = _PLAIN_EVERY[0]

    @property
    def rest(self) -> float:
        """Seconds for which steps are to be plain, and nothing is learned from them."""
        return max(0.0, _RESERVE - self._account) / _SHARE if self._in_debt and self._tried is None else 0.0

    def begin(self, cost: StepCost, num_scheduled: int, num_drawing: int) -> None:
        """A step of so many scheduled rows, in which some sequences draw; what such steps cost."""
        self._cost, self._num_scheduled, self._num_drawing, self._extras, self._price = cost, num_scheduled, num_drawing, [0.0], 0.0
        visits = cost.visits(num_scheduled)
        self._is_plain = visits < _FIRST_PLAIN or self._num_drafting >= min(self._plain_every, _VISITS_SPAN * visits)
        self._token_seconds = cost.seconds(num_drawing) / num_drawing
        if self._is_plain:
            self._num_drafting = 0
        else:
            self._trying, self._tried = self._tried, None

    def asks(self, name: str, seq: Sequence, rival: DraftCandidate | None = None) -> bool:
        """Whether to ask for a draft: where it should pay beyond what another has offered, or now and then."""
        if self._is_plain:
            return False
        method, track = self._methods[name], self._track(name, seq)
        worth = track.worth - (self._net(rival) if rival else 0.0)
        return worth * self._token_seconds >= method.seconds or track.look_at <= self._now or seq.seq_id == self._trying

    def budget(self, name: str, seq: Sequence, most: int) -> int:
        """Nodes to ask for: fewer than `most` where each depth takes time, and the deeper ones should not pay."""
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
        """The draft with its values."""
        method, track = self._methods[name], self._track(name, seq)
        candidate = DraftCandidate(name, draft, track.acceptance.values(draft) if draft.tokens else [])
        net = self._net(candidate)
        track.worth += (net - track.worth) * (_RISE if net > track.worth else _FALL)
        method.worth += (net - method.worth) * _SLOWLY
        track.look_at = self._now + method.seconds * self._num_drawing / _LOOK_SHARE
        return candidate

    def better(self, one: DraftCandidate, other: DraftCandidate) -> DraftCandidate:
        """That which gains more; of equals the first."""
        return other if self._net(other) > self._net(one) else one

    def choose(self, candidates: dict[Sequence, DraftCandidate]) -> dict[Sequence, list[int]]:
        """The nodes to run of each offer, parents with their children, ascending."""
        num_drawing = self._num_drawing
        bundles: list[tuple[float, Sequence, list[int]]] = []
        for seq, candidate in candidates.items():
            if candidate.draft.indivisible:
                nodes = list(range(len(candidate.values)))
                bundles.append((sum(candidate.values) / len(nodes), seq, nodes))
            else:
                bundles += [(value, seq, [node]) for node, value in enumerate(candidate.values)]
        bundles.sort(key=lambda bundle: -bundle[0])  # stable, so parents stay before children of the same value
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
        self._try(candidates, chosen)
        self._num_drafting += bool(chosen)
        return {seq: sorted(nodes) for seq, nodes in chosen.items()}

    def spend(self, name: str, num_seqs: int, num_nodes: int, seconds: float) -> None:
        """To ask one proposer for so many sequences and nodes, and to let it learn, has taken so long."""
        method = self._methods[name]
        if method.seconds:
            seconds = min(seconds, _DEAREST * method.seconds * num_seqs)
        method.seconds += (seconds / num_seqs - method.seconds) * _PRICE
        method.seconds_by_node += (seconds / num_nodes - method.seconds_by_node) * _PRICE
        self._price += method.seconds * num_seqs

    def finish(self, seconds: float, saved: float) -> None:
        """A step has taken so long, after drafts that have saved so much."""
        self._now += seconds
        most = _SAVINGS * seconds
        self._account = min(max(self._account, -_DEBT * seconds - self._price) + _SHARE * seconds + saved, most)
        self._in_debt &= self._account < min(_RESERVE, most)
        self._trial_seconds += _TRIAL_SHARE * seconds

    def charge(self, seconds: float) -> None:
        """What belongs to speculation has taken so long, all told."""
        self._account -= seconds
        self._in_debt |= self._account < 0

    def learn(self, seq: Sequence, candidate: DraftCandidate, tokens: list[int]) -> None:
        """These tokens have followed."""
        self._track(candidate.method, seq).acceptance.record(candidate.draft, tokens)

    def _try(self, candidates: dict[Sequence, DraftCandidate], chosen: dict[Sequence, list[int]]) -> None:
        """Run rows of a sequence that are not expected to pay, for some steps on end, when enough time has been saved for that."""
        spare = [b for b, candidate in candidates.items() if b not in chosen and self._methods[candidate.method].traits.learns_from_rows]
        if not spare:
            return
        begun = [seq for seq in spare if seq.seq_id == self._trying]
        seq = begun[0] if begun else spare[self._num_trials % len(spare)]
        candidate = candidates[seq]
        nodes = list(range(len(candidate.values) if candidate.draft.indivisible else min(_TRIAL_NODES, len(candidate.values))))
        before = sum(map(len, chosen.values()))
        tokens = self._extra(before + len(nodes)) - self._extra(before) - sum(candidate.values[node] for node in nodes)
        seconds = max(0.0, tokens * self._token_seconds)
        if self._trial_seconds >= seconds * (1 if begun else _TRIAL_STEPS):
            self._trial_seconds = min(self._trial_seconds, seconds * _TRIAL_STEPS) - seconds
            self._tried = seq.seq_id
            self._num_trials += not begun
            chosen[seq] = nodes

    def _net(self, candidate: DraftCandidate) -> float:
        """Tokens that an offer gains at best, less those that its rows cost."""
        if candidate.draft.indivisible:
            return max(0.0, sum(candidate.values) - self._extra(len(candidate.values)))
        best = total = 0.0
        for n, value in enumerate(sorted(candidate.values, reverse=True), 1):
            total += value
            best = max(best, total - self._extra(n))
        return best

    def _extra(self, nodes: int) -> float:
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
