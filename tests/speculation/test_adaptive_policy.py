"""Each decision of the adaptive policy: calls, budgets, prices, and the nodes that run."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.batch import NO_DRAFT, DraftTree
from headrace.engine.sequence import Sequence
from headrace.proposer import ProposerTraits
from headrace.speculation.adaptive_policy import AdaptivePolicy
from headrace.speculation.policy import DraftCandidate
from headrace.speculation.step_cost import StepCost
from tests.engine.toy import toy_engine
from tests.speculation.test_adaptive_speculation import Oracle

CHAIN = ProposerTraits(8)
LEARNER = ProposerTraits(8, learns_from_rows=True)


class Machine(StepCost):
    """A machine whose steps take a known time.

    By default a step takes 10 ms with one row and 1.6 ms more for each further row. So a token of
    plain decoding takes 10 ms. If one sequence samples, n draft rows have the price 0.05 + 0.2 n
    tokens, with the margins.
    """

    def __init__(
        self,
        seconds: Callable[[int], float] = lambda rows: 0.0084 + 0.0016 * rows,
        visits: float = 2,
    ) -> None:
        super().__init__()
        self._seconds, self._num_visits = seconds, visits

    def seconds(self, rows: int) -> float:
        return self._seconds(rows)

    def visits(self, rows: int) -> float:
        return self._num_visits * (rows > 0)


def sequences(*prompts: list[int]) -> list[Sequence]:
    engine = toy_engine()
    ids = [engine.add_request(prompt) for prompt in prompts]
    return [engine._requests[request_id].seqs[0] for request_id in ids]


def chain(nodes: int, **options: Any) -> DraftTree:
    return DraftTree([7] * nodes, list(range(-1, nodes - 1)), **options)


def first_drafting_step(
    price: float, *seqs: Sequence, machine: StepCost | None = None, **traits: ProposerTraits
) -> AdaptivePolicy:
    """A policy in its first step with drafts.

    A call to each of its proposers takes `price` seconds per sequence.
    """
    policy = AdaptivePolicy(traits or {"m": CHAIN})
    for name in traits or {"m": CHAIN}:
        policy.record_call(name, dict.fromkeys(seqs, 1), 0.0)
        policy.record_call(name, dict.fromkeys(seqs, 1), 10 * price * len(seqs))
    policy.record_step(0.5, len(seqs))
    begin(policy, len(seqs), machine)
    return policy


def begin(policy: AdaptivePolicy, num_sampling: int = 1, machine: StepCost | None = None) -> None:
    policy.begin_step(machine or Machine(), num_sampling, num_sampling)


def next_probe_is_in(
    policy: AdaptivePolicy, seq: Sequence, seconds: float, num_sampling: int = 1
) -> bool:
    """Whether the next probe of a sequence is due in `seconds`.

    The time moves to a moment after that.
    """
    assert policy.pause_seconds == pytest.approx(min(seconds, 0.1))
    policy.record_step(seconds * 0.999, num_sampling)
    begin(policy, num_sampling)
    early = policy.should_call("m", seq)
    policy.record_step(seconds * 0.002, num_sampling)
    begin(policy, num_sampling)
    return not early and policy.should_call("m", seq) and policy.pause_seconds == 0


class TestBegin:
    def test_no_pause_before_the_first_step(self) -> None:
        assert AdaptivePolicy({"m": CHAIN}).pause_seconds == 0

    @pytest.mark.parametrize(("visits", "calls"), [(1.9, False), (2, True)])
    def test_plain_steps_are_measured_first(self, visits: float, calls: bool) -> None:
        (seq,) = sequences([1])
        policy = AdaptivePolicy({"m": CHAIN})
        begin(policy, machine=Machine(visits=visits))
        assert policy.should_call("m", seq) is calls and policy.pause_seconds == 0

    def test_it_pauses_a_tenth_of_a_second_without_calls(self) -> None:
        policy = AdaptivePolicy({"m": CHAIN})
        begin(policy)
        assert policy.pause_seconds == pytest.approx(0.1)
        policy.record_step(0.03, 1)
        policy.record_step(0.03, 1)
        assert policy.pause_seconds == pytest.approx(0.04)
        policy.record_step(0.1, 1)
        assert policy.pause_seconds == 0

    def test_one_step_after_32_with_drafts_is_plain(self) -> None:
        (seq,) = sequences([1])
        policy = AdaptivePolicy({"m": CHAIN})
        for _ in range(2):
            for _ in range(32):
                begin(policy)
                assert policy.should_call("m", seq)
                assert policy.choose_nodes({seq: DraftCandidate("m", chain(1), [0.9])})
                assert not policy.choose_nodes({seq: DraftCandidate("m", chain(1), [0.1])})
            begin(policy)
            assert not policy.should_call("m", seq) and policy.pause_seconds == 0


class TestGain:
    @pytest.mark.parametrize(
        ("draft", "num_sampling", "gain"),
        [
            (chain(1), 1, 0.5 - 0.25),
            (chain(3), 1, 0.75 - 0.45),  # the third is not worth its row
            (chain(3, indivisible=True), 1, 0.875 - 0.65),
            (
                DraftTree([7, 8, 9], [-1, -1, 0]),
                1,
                0.75 - 0.45,
            ),  # the likeliest two, of 1/2, 1/8 and 1/4
            (
                chain(1),
                2,
                0.5 - 0.05 - 1.5 * 0.0016 / 0.0058,
            ),  # a token takes half of a step of two
        ],
    )
    def test_a_draft_pays_if_it_gains_more_than_the_call_takes(
        self, draft: DraftTree, num_sampling: int, gain: float
    ) -> None:
        seconds = gain * (0.01 if num_sampling == 1 else 0.0058)
        for price, pays in ((0.999 * seconds, True), (1.001 * seconds, False)):
            seqs = sequences(*[[1]] * num_sampling)
            policy = first_drafting_step(price, *seqs)
            assert policy.evaluate("m", seqs[0], draft).draft is draft
            assert (policy.pause_seconds == 0) is pays

    @pytest.mark.parametrize("indivisible", [False, True])
    def test_a_draft_that_costs_more_than_it_gives_has_no_gain(self, indivisible: bool) -> None:
        """Two drafts without gain are equal, so the first is better."""
        (seq,) = sequences([1])
        policy = first_drafting_step(0.001, seq)
        bad, worse = (
            DraftCandidate("m", chain(1, indivisible=indivisible), [value]) for value in (0.2, 0.1)
        )
        assert policy.better(worse, bad) is worse and policy.better(bad, worse) is bad
        good = DraftCandidate("m", chain(1), [0.3])
        assert policy.better(good, bad) is policy.better(bad, good) is good

    def test_values_follow_the_proposer_and_the_sequence(self) -> None:
        one, other = sequences([1], [2])
        policy = first_drafting_step(
            0.001, one, other, m=CHAIN, n=CHAIN._replace(acceptance=(0.8,))
        )
        assert policy.evaluate("m", one, chain(2)) == DraftCandidate("m", chain(2), [0.5, 0.25])
        assert policy.evaluate("n", one, chain(1)).values == pytest.approx([0.8])
        assert policy.evaluate("m", one, NO_DRAFT) == DraftCandidate("m", NO_DRAFT, [])
        policy.record_acceptance(one, DraftCandidate("m", chain(1), []), [7])
        of_all = (1 + 3 * 0.5) / 4
        assert policy.evaluate("m", one, chain(1)).values == pytest.approx([(1 + 3 * of_all) / 4])
        assert policy.evaluate("m", other, chain(1)).values == pytest.approx([of_all])
        assert policy.evaluate("n", one, chain(1)).values == pytest.approx([0.8])


class TestProbes:
    @pytest.mark.parametrize("num_sampling", [1, 2])
    def test_the_share_of_probes_halves_with_each_failed_probe(self, num_sampling: int) -> None:
        seq, *others = sequences(*[[1]] * num_sampling)
        policy = first_drafting_step(0.001, seq, *others)
        for share in (0.05, 0.025, 0.0125, 0.00625, 0.003125, 0.0025, 0.0025):
            policy.evaluate("m", seq, NO_DRAFT)
            assert next_probe_is_in(policy, seq, 0.001 * num_sampling / share, num_sampling)

    def test_a_draft_that_gains_less_than_the_call_takes_is_a_failed_probe(self) -> None:
        """It pays if tokens take longer."""
        (seq,) = sequences([1])
        policy = first_drafting_step(0.004, seq)
        policy.evaluate("m", seq, chain(2))  # gains 0.3 tokens
        assert next_probe_is_in(policy, seq, 0.004 / 0.05)
        policy.evaluate("m", seq, chain(2))
        begin(policy, machine=Machine(lambda rows: 2 * (0.0084 + 0.0016 * rows)))
        assert policy.should_call("m", seq) and policy.pause_seconds == 0

    def test_a_draft_that_pays_resets_the_share(self) -> None:
        (seq,) = sequences([1])
        policy = first_drafting_step(0.001, seq)
        for _ in range(3):
            policy.evaluate("m", seq, NO_DRAFT)
        policy.evaluate("m", seq, chain(2))
        assert policy.pause_seconds == 0 and policy.should_call("m", seq)
        policy.evaluate("m", seq, NO_DRAFT)
        assert next_probe_is_in(policy, seq, 0.001 / 0.05)

    @pytest.mark.parametrize(("time", "is_early"), [(0.49, False), (0.51, True)])
    def test_probes_of_several_sequences_move_into_one_step(
        self, time: float, is_early: bool
    ) -> None:
        """In a step with a due call, a probe may be early by half of its delay."""
        one, other = sequences([1], [2])
        policy = first_drafting_step(0.001, one, other)
        policy.evaluate("m", one, NO_DRAFT)
        policy.record_step(time * 0.001 * 2 / 0.05, 2)
        begin(policy, 2)
        assert not policy.should_call("m", one)
        assert policy.should_call("m", other)  # its first probe
        policy.record_step(0.0, 2)
        begin(policy, 2)
        assert policy.should_call("m", one) is is_early

    def test_a_proposer_that_learns_from_rows_has_probes_of_six_steps(self) -> None:
        (seq,) = sequences([1])
        policy = first_drafting_step(0.001, seq, m=LEARNER)
        for _ in range(2):
            for _ in range(5):
                policy.evaluate("m", seq, NO_DRAFT)
                assert policy.pause_seconds == 0 and policy.should_call("m", seq)
            policy.evaluate("m", seq, chain(1))  # which pays and resets the count
        for share in (0.05, 0.025):
            for _ in range(6):
                assert policy.pause_seconds == 0
                policy.evaluate("m", seq, NO_DRAFT)
            assert next_probe_is_in(policy, seq, 6 * (0.001 + (0.05 + 4 * 0.2) * 0.01) / share)

    def test_an_expensive_first_call_waits_as_long_as_the_last_sequence(self) -> None:
        """A first call is cheap up to a hundredth of a token's time per known token."""
        for seconds, calls in ((0.0001, True), (0.00011, False)):
            one, other = sequences([1] * 4, [2])
            policy = AdaptivePolicy({"m": CHAIN})
            begin(policy)
            assert policy.should_call("m", one)
            policy.record_call("m", {one: 8}, 4 * seconds)
            policy.record_call("m", {one: 8}, 0.01)
            policy.evaluate("m", one, NO_DRAFT)
            assert policy.should_call("m", other) is calls
            if not calls:
                assert next_probe_is_in(policy, other, 0.001 / 0.05)
                policy.evaluate("m", other, NO_DRAFT)
                assert next_probe_is_in(policy, other, 0.001 / 0.025)

    def test_the_price_of_a_first_call_is_an_average(self) -> None:
        """Per token it is 0.0002, then 0.9 of that plus 0.1 of 0.000001, and so on: below 0.0001
        after eight sequences.
        """
        seqs = sequences(*[[1, 2]] * 9)
        policy = AdaptivePolicy({"m": CHAIN})
        begin(policy)
        policy.record_call("m", {seqs[0]: 8}, 0.0004)
        policy.record_call("m", {seqs[0]: 8}, 0.01)
        policy.evaluate("m", seqs[0], NO_DRAFT)
        asked = []
        for seq in seqs[1:]:
            asked.append(policy.should_call("m", seq))
            policy.record_call("m", {seq: 8}, 0.000002)
        assert asked == [False] * 7 + [True]

    def test_the_first_call_of_a_learner_is_never_cheap(self) -> None:
        one, other = sequences([1], [2])
        policy = first_drafting_step(0.0, one, m=LEARNER)
        for _ in range(6):
            policy.evaluate("m", one, NO_DRAFT)
        assert not policy.should_call("m", other)


class TestRivals:
    def test_a_call_must_gain_more_than_the_rival_by_its_price(self) -> None:
        """The last draft gained 0.3 tokens."""
        (seq,) = sequences([1])
        for value, calls in ((0.449, True), (0.451, False)):
            policy = first_drafting_step(0.001, seq)
            policy.evaluate("m", seq, chain(2))
            rival = DraftCandidate("n", chain(1), [value])  # gains 0.2 tokens, which are 2 ms
            assert policy.should_call("m", seq, rival) is calls
            assert policy.should_call("m", seq) and policy.pause_seconds == 0

    @pytest.mark.parametrize("num_sampling", [1, 2])
    @pytest.mark.parametrize("draft", [chain(2), NO_DRAFT])
    def test_a_due_probe_is_called_in_spite_of_a_rival(
        self, num_sampling: int, draft: DraftTree
    ) -> None:
        seq, *others = sequences(*[[1]] * num_sampling)
        policy = first_drafting_step(0.0001, seq, *others)
        policy.evaluate("m", seq, draft)
        asked = []
        for _ in range(2):
            policy.record_step(0.0011 * num_sampling, num_sampling)
            begin(policy, num_sampling)
            asked.append(policy.should_call("m", seq, DraftCandidate("n", chain(1), [0.9])))
        assert asked == [False, True]


class TestPrices:
    def test_prices_are_averages_that_bound_an_interruption(self) -> None:
        seq, other = sequences([1], [2])
        policy = AdaptivePolicy({"m": CHAIN})
        begin(policy)
        policy.record_call("m", {seq: 4, other: 4}, 9.0)  # first calls have their own price
        price, one, both = 0.0, {seq: 4}, {seq: 4, other: 4}
        for seconds, counts, nodes in (
            (0.02, 0.02, one),
            (0.012, 0.006, both),
            (9.0, 4 * 0.0024, both),
        ):
            policy.record_call("m", nodes, seconds)
            price += 0.1 * (counts - price)
            begin(policy, machine=Machine(lambda rows: 0.01))
            policy.evaluate("m", seq, chain(3))  # which pays
            policy.evaluate("m", seq, NO_DRAFT)
            assert policy.pause_seconds == pytest.approx(price / 0.05)


class TestMaxNodes:
    CHEAP = Machine(lambda rows: 0.0092 + 0.0008 * rows)
    """A draft row costs 0.1 tokens."""

    def budget(
        self,
        most: int,
        machine: StepCost,
        *,
        by_node: float = 0.0,
        draft: DraftTree = NO_DRAFT,
        width: int = 1,
    ) -> int:
        seq, other = sequences([1], [2])
        policy = AdaptivePolicy({"m": ProposerTraits(8, width, acceptance=(0.5, 0.9))})
        policy.record_call("m", {seq: 1}, 0.0)
        # The average is a tenth of the first, then a tenth of the difference more: 0.12.
        for share in (1, 0.3):
            policy.record_call("m", {seq: 5}, share * 5 * by_node / 0.12)
        policy.record_acceptance(other, DraftCandidate("m", draft, []), [7] * 9)
        begin(policy, machine=machine)
        return policy.max_nodes("m", seq, most)

    def test_the_limit_if_a_deeper_draft_takes_no_longer(self) -> None:
        assert self.budget(8, Machine(lambda rows: float(rows)), width=0) == 8

    def test_at_least_the_first_depth(self) -> None:
        assert self.budget(8, Machine(lambda rows: float(rows))) == 1
        assert self.budget(8, Machine(lambda rows: float(rows)), width=3) == 3

    def test_deeper_while_it_pays(self) -> None:
        """Half of the nodes are right at each depth.

        The second depth gains 0.25 tokens, the third 0.125, the fourth 0.0625.
        """
        assert self.budget(8, Machine()) == 2
        assert self.budget(8, self.CHEAP) == 3
        assert self.budget(2, self.CHEAP) == 2
        for by_node, nodes in (
            (0.00024, 3),
            (0.00026, 2),
            (0.0014, 2),
            (0.0016, 1),
        ):  # 0.01 s for a token
            assert self.budget(8, self.CHEAP, by_node=by_node) == nodes

    def test_each_depth_has_width_nodes(self) -> None:
        """A second child is right in 1/8. The second depth gains 0.3125, the third 0.15625."""
        assert self.budget(8, self.CHEAP, width=2) == 4
        assert self.budget(3, self.CHEAP, width=2) == 3
        assert self.budget(1, self.CHEAP, width=2) == 1

    def test_the_rates_of_each_depth_count(self) -> None:
        """Rates after one draft: 3/8 at all depths; 5/8, then 0.72; 5/8, then 0.47."""
        assert self.budget(8, Machine(), draft=DraftTree([8], [-1])) == 1  # 0.14
        assert (
            self.budget(8, Machine(), draft=DraftTree([7, 7], [-1, 0])) == 4
        )  # 0.45, 0.32, 0.23, 0.17
        dear = Machine(lambda rows: 0.008 + 0.002 * rows)  # a row costs 0.25 tokens
        assert self.budget(8, dear, draft=DraftTree([7, 8], [-1, 0])) == 2  # 0.29, 0.14

    def test_the_rows_of_all_sequences_that_sample_count(self) -> None:
        seqs = sequences([1], [2])
        policy = first_drafting_step(
            0.0,
            *seqs,
            m=ProposerTraits(8, 1),
            machine=Machine(lambda rows: 0.01 + 0.004 * (rows > 6)),
        )
        assert (
            policy.max_nodes("m", seqs[0], 8) == 2
        )  # with a third node of each there are eight rows
        begin(policy, 2, self.CHEAP)  # a row costs 0.22 tokens, of one of two sequences
        assert policy.max_nodes("m", seqs[0], 8) == 2


class TestChooseNodes:
    def run(
        self,
        *drafts: tuple[DraftTree, list[float]],
        machine: StepCost | None = None,
        traits: ProposerTraits = CHAIN,
    ) -> list[list[int]]:
        """The nodes that run of each draft, from drafts and their values, one for each sequence."""
        seqs = sequences(*[[1]] * len(drafts))
        policy = first_drafting_step(0.0, *seqs, machine=machine, m=traits)
        chosen = policy.choose_nodes(
            {seq: DraftCandidate("m", *draft) for seq, draft in zip(seqs, drafts, strict=True)}
        )
        return [chosen.get(seq, []) for seq in seqs]

    def test_the_number_of_nodes_with_the_most_tokens_per_second(self) -> None:
        """Tokens in the time of a plain step, by number of nodes: 1.2, 1.207, 1.136."""
        assert self.run((chain(3), [0.5, 0.25, 0.125])) == [[0, 1]]
        assert self.run((chain(3), [0.5, 0.2, 0.125])) == [[0]]  # 1.2, 1.17
        assert self.run((chain(1), [0.26])) == [[0]]
        assert self.run((chain(2), [0.24, 0.1])) == [[]]

    def test_the_likeliest_nodes_in_ascending_order(self) -> None:
        assert self.run((DraftTree([1, 2, 3], [-1, -1, 0]), [0.6, 0.1, 0.5])) == [[0, 2]]
        assert self.run((DraftTree([1, 2, 3], [-1, -1, 1]), [0.5, 0.6, 0.5])) == [[0, 1, 2]]

    def test_an_indivisible_draft_runs_with_all_nodes_or_none(self) -> None:
        assert self.run((chain(3, indivisible=True), [0.5, 0.25, 0.125])) == [[0, 1, 2]]
        assert self.run((chain(3, indivisible=True), [0.4, 0.15, 0.05])) == [[]]

    def test_nodes_of_several_sequences(self) -> None:
        """Drafts are sorted by the mean value of a node. A row has the price 0.41 tokens here."""
        assert self.run((chain(2), [0.9, 0.8]), (chain(1), [0.85])) == [[0, 1], [0]]
        assert self.run((chain(2), [0.9, 0.3]), (chain(2, indivisible=True), [0.5, 0.3])) == [
            [0],
            [],
        ]
        assert self.run((chain(2, indivisible=True), [0.5, 0.3]), (chain(2), [0.9, 0.3])) == [
            [],
            [0],
        ]

    def test_one_probe_for_a_proposer_that_learns_from_rows(self) -> None:
        bad = chain(6), [0.0] * 6
        assert self.run(bad, traits=LEARNER) == [[0, 1, 2, 3]]
        assert self.run((chain(3), [0.0] * 3), traits=LEARNER) == [[0, 1, 2]]
        assert self.run((chain(6, indivisible=True), [0.0] * 6), traits=LEARNER) == [list(range(6))]
        assert self.run(bad, bad, traits=LEARNER) == [[0, 1, 2, 3], []]
        assert self.run((chain(1), [0.9]), bad, traits=LEARNER) == [[0], [0, 1, 2, 3]]
        assert self.run(bad) == [[]]


def test_a_call_without_granted_slots_is_due_in_the_next_step() -> None:
    """A call that never happened is not a failed probe."""
    (seq,) = sequences([1, 2, 3])
    cost, policy = StepCost(), AdaptivePolicy({"oracle": Oracle.traits})
    for _ in range(5):
        cost.record(1, 0.002)
    policy.begin_step(cost, 1, 1)
    assert policy.should_call("oracle", seq)
    assert policy.pause_seconds == 0
    policy.evaluate("oracle", seq, NO_DRAFT)
    policy.record_call("oracle", {seq: 8}, 0.001)
    policy.record_step(0.002, 1)
    policy.begin_step(cost, 1, 1)
    assert policy.should_call("oracle", seq)  # a first call sets no price
    policy.record_call("oracle", {seq: 8}, 0.001)
    policy.evaluate("oracle", seq, NO_DRAFT)
    assert policy.pause_seconds > 0
