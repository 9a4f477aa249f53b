"""Adaptive speculation: run the draft nodes that give the most tokens per second, often none.

When drafts do not pay, the next call is a *probe*. The share of time for probes halves with each
failure. Estimates decide what should pay; the account of a proposer bounds what they may cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from weakref import WeakKeyDictionary

from headrace.batch import DraftTree
from headrace.proposer import ProposerTraits, SequenceView
from headrace.speculation.acceptance import AcceptanceRates, node_class
from headrace.speculation.account import START_SECONDS, Account
from headrace.speculation.policy import DraftCandidate, Key
from headrace.speculation.prices import CallPrice, RowPrices
from headrace.speculation.step_cost import StepCost

_MAX_PROBE_SHARE, _MIN_PROBE_SHARE = 0.05, 0.0025
"""Shares of a sequence's time for one proposer, at first and at last."""
_MAX_PAUSE = 0.1
"""Longest pause in seconds."""
_CHEAP_FIRST_CALL = 0.01
"""Price per known token up to which a new sequence gets its first call, in plain tokens."""
_PROBE_STEPS = 6
"""Steps of a probe, for a proposer that learns only from rows that run."""
_EARLY = 0.5
"""Part of the delay of a probe that a step with other calls cuts."""
_PROBE_NODES = 4
_MIN_PLAIN_STEPS = 2
_GAIN_RATE = 0.25
"""Weight of the newest draft, if each node has a confidence: then an unsure draft is short and
cheap, and says little about the next.
"""
_FOLLOWED_STEPS = 2
"""Plain steps before a call from which on a proposer follows the rows of a sequence."""
_PLAIN_EVERY = 32
"""Steps with drafts before one plain step, which measures the cost of plain steps."""


@dataclass
class _SequenceState:
    acceptance: AcceptanceRates
    is_new: bool = True
    is_admitted: bool = False
    """Whether the proposer's account afforded to read the sequence."""
    is_missed: bool = False
    """Whether rows of its prompt were not kept."""
    prepaid: float = 0.0
    """Seconds booked for reading it."""
    gain: float = 0.0
    """Tokens that the next draft should gain, less the price of its rows, by the last drafts."""
    num_failed: int = 0
    probe_share: float = _MAX_PROBE_SHARE
    probed: float = 0.0
    """Time of the last failed probe; like the next, seconds on the clock `AdaptivePolicy._now`."""
    next_probe: float = 0.0
    rival_share: float = _MAX_PROBE_SHARE
    """Share of the time for probes that do not pay because another proposer drafts better."""


@dataclass
class _ProposerState:
    traits: ProposerTraits
    acceptance: AcceptanceRates
    price: CallPrice = field(default_factory=CallPrice)
    accounts: dict[int, Account] = field(default_factory=dict)
    """Accounts by bit length of the number of sequences: more rows make drafts dear."""
    last: dict[int, _SequenceState] = field(default_factory=dict)
    """The state of the last call, by the same key."""
    planned: float = 0.0
    """Seconds of the probes of this step."""
    is_reading: bool = False
    """Whether it observes a sequence without a call so far."""
    is_pricing: bool = False
    """Whether this step has the first call of all."""
    read_seconds: float = 0.0
    """Seconds of observations of prompts before a first call."""
    seqs: WeakKeyDictionary[SequenceView, _SequenceState] = field(default_factory=WeakKeyDictionary)

    @property
    def probe_steps(self) -> int:
        return _PROBE_STEPS if self.traits.learns_from_rows else 1

    @property
    def never_drafts(self) -> bool:
        """Whether it only records rows, so that no account limits it."""
        return not self.traits.max_nodes


class AdaptivePolicy:
    """A `DraftPolicy` that compares the expected gain of drafts with their cost."""

    def __init__(self, traits: Mapping[str, ProposerTraits]) -> None:
        self._proposers = {
            name: _ProposerState(each, AcceptanceRates(prior=each.acceptance))
            for name, each in traits.items()
        }
        self._now = 0.0
        self._prices = RowPrices(StepCost(), 1, 1)
        self._is_plain = True
        self._size = 1
        """Bit length of the number of sequences, the key of accounts."""
        self._num_drafting = 0
        self._pause_end = 0.0
        """Seconds on the clock `_now`."""
        self._is_probing = False
        """Whether the step has a due call, so that others may be early."""
        self._next_calls: dict[tuple[str, tuple[int, int]], float] = {}
        """Seconds on the clock `_now`, by proposer and `seq_id`."""

    @property
    def pause_seconds(self) -> float:
        return max(0.0, min([self._pause_end, *self._next_calls.values()]) - self._now)

    def begin_step(self, cost: StepCost, num_scheduled: int, num_sampling: int) -> None:
        self._prices = RowPrices(cost, num_scheduled, num_sampling)
        self._size = num_sampling.bit_length()
        for proposer in self._proposers.values():
            proposer.planned = 0.0
            self._account(proposer).set_limit(self._prices.token_seconds, num_sampling)
        self._is_probing = min(self._next_calls.values(), default=inf) <= self._now
        has_few_measurements = cost.visits(num_scheduled) < _MIN_PLAIN_STEPS
        self._is_plain = has_few_measurements or self._num_drafting >= _PLAIN_EVERY
        self._next_calls = {}
        if self._is_plain:
            self._num_drafting = 0
            self._pause_end = self._now
        else:
            self._pause_end = self._now + _MAX_PAUSE

    def should_call(
        self, name: str, seq: SequenceView, rival: DraftCandidate | None = None
    ) -> bool:
        """Whether a proposer should gain more than `rival`, or a probe of it is due."""
        if self._is_plain:
            return False
        proposer, state = self._proposers[name], self._state(name, seq)
        pays, next_probe = self._pays(proposer, state.gain), state.next_probe
        if rival and pays:
            pays = self._pays(proposer, state.gain - self.gain(rival))
            next_probe += self._probe_delay(proposer, state.rival_share)
            if pays:
                state.rival_share = _MAX_PROBE_SHARE
        is_due = pays or next_probe <= self._now
        if self._is_probing and not pays and not rival:
            # Probes of several sequences move into the same steps: each ends multi-step decoding.
            is_due = next_probe - self._now <= _EARLY * (next_probe - state.probed)
        wait = self._wait(proposer, state, seq, is_probe=not pays)
        if not rival:
            # If no slots are granted for the draft, it is not evaluated: the call is still due.
            next_call = self._now if is_due else next_probe
            self._next_calls[name, seq.seq_id] = max(next_call, self._now + wait)
        if not is_due or wait:
            return False
        if rival and not pays:
            state.rival_share = max(state.rival_share / 2, _MIN_PROBE_SHARE)
        elif not pays:
            proposer.planned += proposer.price.by_sequence
        self._admit(proposer, state, seq)
        return True

    def follows(self, name: str, seq: SequenceView) -> bool:
        proposer, state = self._proposers[name], self._state(name, seq)
        if proposer.never_drafts:
            return True
        proposer.is_reading |= state.is_new
        if state.is_admitted:
            # A draft needs the row of the step before it.
            next_call = self._next_calls.get((name, seq.seq_id), self._now)
            steps = self._prices.token_seconds * self._prices.num_sampling
            is_due = next_call <= self._now + _FOLLOWED_STEPS * steps
            return is_due and not self._account(proposer).wait()
        pays = self._pays(proposer, state.gain)
        is_due = pays or state.next_probe <= self._now
        if not is_due or self._wait(proposer, state, seq, is_probe=not pays):
            state.is_missed = True
            return False
        self._admit(proposer, state, seq)
        return True

    def max_nodes(self, name: str, seq: SequenceView, limit: int) -> int:
        """Nodes to request: below `limit` if deeper nodes take time and do not pay."""
        proposer = self._proposers[name]
        max_width, acceptance = proposer.traits.width, self._state(name, seq).acceptance
        if not max_width or acceptance.is_by_node:
            return limit  # its confidences end a draft: see `pays_below`

        reached, num_nodes = 1.0, 0  # probability that the deepest node so far is accepted
        while num_nodes < limit:
            width = min(max_width, limit - num_nodes)
            depth = num_nodes // max_width + 1
            if num_nodes and not self._depth_pays(proposer, acceptance, reached, depth, width):
                break

            num_nodes += width
            reached *= acceptance.rate(node_class(0, depth, 0))
        return num_nodes

    def pays_below(self, name: str, seq: SequenceView, confidences: Sequence[int]) -> bool:
        proposer, acceptance = self._proposers[name], self._state(name, seq).acceptance
        reached = 1.0
        for depth, confidence in enumerate(confidences, 1):
            reached *= acceptance.rate(node_class(confidence, depth, 0))
        depth = len(confidences) + 1
        return self._depth_pays(proposer, acceptance, reached, depth, proposer.traits.width)

    def _depth_pays(
        self,
        proposer: _ProposerState,
        acceptance: AcceptanceRates,
        reached: float,
        depth: int,
        width: int,
    ) -> bool:
        """Whether `width` nodes at a depth pay, if their parent is accepted with the probability
        `reached`. All sequences are taken to draft this deep.
        """
        prices, num_sampling = self._prices, self._prices.num_sampling
        num_nodes = (depth - 1) * proposer.traits.width
        rates = [acceptance.rate(node_class(0, depth, rank)) for rank in range(width)]
        rows = prices.price((num_nodes + width) * num_sampling)
        rows -= prices.price(num_nodes * num_sampling)
        call = width * proposer.price.by_node / prices.token_seconds
        return reached * sum(rates) >= rows / num_sampling + call

    def evaluate(self, name: str, seq: SequenceView, draft: DraftTree) -> DraftCandidate:
        """Estimate the gain of a draft, which decides the next call."""
        proposer, state = self._proposers[name], self._state(name, seq)
        candidate = DraftCandidate(name, draft, state.acceptance.values(draft))
        gain = self.gain(candidate)
        if state.gain and state.acceptance.is_by_node:
            state.gain += _GAIN_RATE * (gain - state.gain)
        else:
            state.gain = gain
        if self._pays(proposer, state.gain):
            state.num_failed = 0
            state.probe_share = _MAX_PROBE_SHARE
            state.next_probe = self._now
        else:
            state.num_failed += 1
            if state.num_failed % proposer.probe_steps == 0:
                state.probed = self._now
                state.next_probe = self._now + self._probe_delay(proposer, state.probe_share)
                state.probe_share = max(state.probe_share / 2, _MIN_PROBE_SHARE)
        self._next_calls[name, seq.seq_id] = state.next_probe
        proposer.last[self._size] = state
        return candidate

    def better(self, first: DraftCandidate, second: DraftCandidate) -> DraftCandidate:
        return second if self.gain(second) > self.gain(first) else first

    def gain(self, candidate: DraftCandidate) -> float:
        return self._prices.gain(candidate.values, indivisible=candidate.draft.indivisible)

    def choose_nodes(self, candidates: Mapping[Key, DraftCandidate]) -> dict[Key, list[int]]:
        bundles: list[tuple[float, Key, list[int]]] = []  # mean value of the nodes, key, nodes
        for key, candidate in candidates.items():
            if candidate.draft.indivisible:
                nodes = list(range(len(candidate.values)))
                bundles.append((sum(candidate.values) / len(nodes), key, nodes))
            else:
                bundles += [(value, key, [node]) for node, value in enumerate(candidate.values)]
        # A stable sort keeps a parent before a child of the same value.
        bundles.sort(key=lambda bundle: -bundle[0])

        best_rate, num_taken = 1.0, 0  # tokens in the time of a plain token
        num_tokens, num_nodes = float(self._prices.num_sampling), 0
        for i, (value, _, nodes) in enumerate(bundles, 1):
            num_tokens += value * len(nodes)
            num_nodes += len(nodes)
            rate = num_tokens / (self._prices.num_sampling + self._prices.price(num_nodes))
            if rate > best_rate:
                best_rate, num_taken = rate, i

        chosen: dict[Key, list[int]] = {}
        for _, key, nodes in bundles[:num_taken]:
            chosen.setdefault(key, []).extend(nodes)
        self._add_probe(candidates, chosen)
        self._num_drafting += bool(chosen)
        return {key: sorted(nodes) for key, nodes in chosen.items()}

    def record_step(self, seconds: float, num_seqs: int) -> None:
        self._now += seconds
        self._size = num_seqs.bit_length()
        for proposer in self._proposers.values():
            proposer.is_pricing = False
            self._account(proposer).pass_time(seconds)

    def record_savings(self, name: str, seconds: float) -> None:
        self._account(self._proposers[name]).book(seconds)

    def record_observation(self, name: str, seconds: float) -> None:
        proposer = self._proposers[name]
        self._account(proposer).book(-seconds)
        if proposer.is_reading:
            proposer.read_seconds += seconds
        proposer.is_reading = False

    def record_acceptance(
        self, seq: SequenceView, candidate: DraftCandidate, tokens: list[int]
    ) -> None:
        self._state(candidate.method, seq).acceptance.record(candidate.draft, tokens)

    def record_call(self, name: str, nodes: Mapping[SequenceView, int], seconds: float) -> None:
        proposer = self._proposers[name]
        price, account = proposer.price, self._account(proposer)
        states = {seq: self._state(name, seq) for seq in nodes}
        account.book(sum(state.prepaid for state in states.values()))
        read = [seq for seq, state in states.items() if state.is_new and not state.is_missed]
        for state in states.values():
            state.is_new, state.prepaid = False, 0.0
        if not read:
            account.book(-price.record(len(nodes), sum(nodes.values()), seconds))
            return
        account.book(-seconds)
        price.record_first(sum(len(seq.known) for seq in read), seconds + proposer.read_seconds)
        proposer.read_seconds, proposer.is_pricing = 0.0, False

    def forget(self, name: str) -> None:
        proposer = self._proposers[name]
        proposer.acceptance = AcceptanceRates(prior=proposer.traits.acceptance)
        proposer.last.clear()
        proposer.accounts.clear()
        proposer.seqs.clear()

    def _add_probe(
        self, candidates: Mapping[Key, DraftCandidate], chosen: dict[Key, list[int]]
    ) -> None:
        for key, candidate in candidates.items():
            if key not in chosen and self._proposers[candidate.method].traits.learns_from_rows:
                num_nodes = len(candidate.values)
                if not candidate.draft.indivisible:
                    num_nodes = min(_PROBE_NODES, num_nodes)
                chosen[key] = list(range(num_nodes))
                return

    def _pays(self, proposer: _ProposerState, gain: float) -> bool:
        return gain * self._prices.token_seconds > proposer.price.by_sequence

    def _probe_delay(self, proposer: _ProposerState, share: float) -> float:
        seconds = proposer.price.by_sequence
        if proposer.traits.learns_from_rows:
            rows = self._prices.price(_PROBE_NODES) * self._prices.token_seconds
            seconds = _PROBE_STEPS * (seconds + rows)
        return seconds * self._prices.num_sampling / share

    def _account(self, proposer: _ProposerState) -> Account:
        account = proposer.accounts.get(self._size)
        if account is None:
            start = 0.0 if proposer.accounts else START_SECONDS
            account = proposer.accounts[self._size] = Account(start)
            account.set_limit(self._prices.token_seconds, self._prices.num_sampling)
        return account

    def _wait(
        self, proposer: _ProposerState, state: _SequenceState, seq: SequenceView, *, is_probe: bool
    ) -> float:
        """Seconds until the account affords a call; 0: now."""
        if proposer.never_drafts:
            return 0.0
        account, price = self._account(proposer), proposer.price
        if not state.is_admitted and state.is_new:
            if proposer.is_pricing:  # the first call tells the price of others
                return _MAX_PAUSE
            num_read = 0 if state.is_missed else len(seq.known)
            return account.wait(price.first_by_token * num_read, has_reserve=is_probe)
        if is_probe and state.num_failed % proposer.probe_steps == 0:
            return account.wait(proposer.planned + price.by_sequence)
        return account.wait()

    def _admit(self, proposer: _ProposerState, state: _SequenceState, seq: SequenceView) -> None:
        """Let a proposer read a sequence, and book the price, until the first call tells it."""
        if state.is_admitted or not state.is_new:
            return
        state.is_admitted = True
        proposer.is_pricing = not proposer.price.is_known
        num_read = 0 if state.is_missed else len(seq.known)
        state.prepaid = proposer.price.first_by_token * num_read
        self._account(proposer).book(-state.prepaid)

    def _state(self, name: str, seq: SequenceView) -> _SequenceState:
        """State of a proposer on a sequence.

        A new sequence waits for an expensive first call as long as the last for its next probe.
        """
        proposer = self._proposers[name]
        state = proposer.seqs.get(seq)
        if state is None:
            state = proposer.seqs[seq] = _SequenceState(AcceptanceRates(proposer.acceptance))
            max_price = _CHEAP_FIRST_CALL * self._prices.token_seconds
            is_cheap = proposer.price.first_by_token <= max_price
            last = proposer.last.get(self._size)
            if last and (proposer.traits.learns_from_rows or not is_cheap):
                state.gain = last.gain
                state.probe_share = last.probe_share
                state.probed, state.next_probe = last.probed, last.next_probe
        return state
