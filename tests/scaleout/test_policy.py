"""The router against a twin that keeps whole prefixes in plain lists, under any order of calls; and
what it chooses.
"""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import NoReplicaError, RequestError
from headrace.scaleout.policy import PrefixRouter, Routed, Scope, StepCost

COST = StepCost(0.01, 0.0001, 0.0005, chunk=64, max_num_seqs=8)
NAMES = ("a", "b", "c", "d")
SCOPES: tuple[Scope | None, ...] = (
    None,
    ("tenant", None),
    (None, "adapter"),
    ("tenant", "adapter"),
    ("other", None),
)
TOKENS = st.lists(st.integers(0, 1), max_size=24)
Prefix = tuple[Scope, tuple[int, ...]]


class Twin:
    """What a replica is believed to hold: prefixes of whole blocks, the least recently used
    first.
    """

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.prefixes: list[Prefix] = []
        self.active: dict[int, tuple[Routed, int]] = {}
        """Requests by number, each with the rows that it has queued."""

    def use(self, scope: Scope, tokens: list[int], size: int, most: int) -> None:
        for blocks in reversed(range(1, min(len(tokens) // size, most) + 1)):
            prefix = scope, tuple(tokens[: blocks * size])
            self.prefixes = [one for one in self.prefixes if one != prefix] + [prefix]
        self.prefixes = self.prefixes[max(0, len(self.prefixes) - most) :]

    def cached(self, scope: Scope, tokens: list[int], size: int) -> int:
        lengths = range(size, len(tokens), size)
        return max(
            (length for length in lengths if (scope, tuple(tokens[:length])) in self.prefixes),
            default=0,
        )


class RouterMachine(RuleBasedStateMachine):
    """Replicas come, go and start again, and requests come and end in all ways."""

    @initialize(size=st.integers(1, 4), most=st.integers(1, 8), first=st.integers(0, 5))
    def start(self, size: int, most: int, first: int) -> None:
        self.size, self.most = size, most
        self.router = PrefixRouter(size, most, first)
        self.twins: dict[str, Twin] = {}
        self.routed: list[tuple[Routed, list[int], Scope]] = []

    @rule(
        name=st.sampled_from(NAMES),
        boot_id=st.sampled_from("12"),
        cost=st.sampled_from([COST, replace(COST, row_seconds=0.001)]),
    )
    def join(self, name: str, boot_id: str, cost: StepCost) -> None:
        self.router.join(name, boot_id, cost)
        if name not in self.twins or self.twins[name].boot_id != boot_id:
            self.twins[name] = Twin(boot_id)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.router.leave(name)
        self.twins.pop(name, None)

    @rule(
        tokens=TOKENS,
        scope=st.sampled_from(SCOPES),
        among=st.none() | st.sets(st.sampled_from([*NAMES, "unknown"])),
    )
    def route(self, tokens: list[int], scope: Scope | None, among: set[str] | None) -> None:
        possible = set(self.twins) if among is None else among & set(self.twins)
        if not possible:
            with pytest.raises(NoReplicaError):
                self.router.route(tokens, scope, among)
            return
        routed, key = self.router.route(tokens, scope, among), scope or (None, None)
        assert routed.replica in possible
        twin = self.twins[routed.replica]
        assert routed.cached_tokens == twin.cached(key, tokens, self.size)
        assert routed.rows == len(tokens) - routed.cached_tokens
        assert routed.seconds > 0
        twin.use(key, tokens, self.size, self.most)
        twin.active[routed.number] = routed, routed.rows
        self.routed.append((routed, tokens, key))

    @precondition(lambda self: self.routed)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        routed, _, _ = data.draw(st.sampled_from(self.routed))
        self.router.first_token(routed)
        for twin in self.twins.values():
            if routed.number in twin.active:
                twin.active[routed.number] = routed, 0

    @precondition(lambda self: self.routed)
    @rule(data=st.data(), output=TOKENS, way=st.sampled_from(["tokens", "unknown", "failed"]))
    def end(self, data: st.DataObject, output: list[int], way: str) -> None:
        """Some that have ended already, or whose replica is gone, are among them."""
        routed, tokens, scope = data.draw(st.sampled_from(self.routed))
        if way == "failed":
            self.router.failed(routed)
        else:
            self.router.ended(routed, tokens + output if way == "tokens" else None)
        for twin in self.twins.values():
            if twin.active.pop(routed.number, None) and way == "tokens":
                twin.use(scope, (tokens + output)[:-1], self.size, self.most)

    @rule(name=st.sampled_from(NAMES), queued=st.integers(0, 50), running=st.integers(0, 5))
    def report(self, name: str, queued: int, running: int) -> None:
        self.router.report(name, queued, running)

    @invariant()
    def counts_are_those_of_what_is_under_way(self) -> None:
        assert set(self.router.replicas) == set(self.twins)
        for name, twin in self.twins.items():
            assert self.router.running(name) == len(twin.active)
            assert self.router.queued_rows(name) == sum(rows for _, rows in twin.active.values())
            assert self.router.num_held(name) == len(twin.prefixes) <= self.most

    @invariant()
    def the_tree_has_no_more_than_replicas_hold(self) -> None:
        assert self.router.num_blocks == len(
            {prefix for twin in self.twins.values() for prefix in twin.prefixes}
        )

    def teardown(self) -> None:
        for routed, _, _ in self.routed:
            self.router.ended(routed)
        assert all(
            self.router.running(name) == self.router.queued_rows(name) == 0 for name in self.twins
        )
        for name in list(self.twins):
            self.router.leave(name)
        assert self.router.num_blocks == 0


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def router_of(*names: str, **options: Any) -> PrefixRouter:
    router = PrefixRouter(**{"block_size": 4, "max_blocks": 64} | options)
    for name in names:
        router.join(name, "1", COST)
    return router


def prompt(seed: int, length: int = 64) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def served(router: PrefixRouter, routed: Routed, tokens: list[int]) -> None:
    router.first_token(routed)
    router.ended(routed, tokens)


class TestChoice:
    def test_a_prompt_goes_where_its_beginning_is(self) -> None:
        router = router_of("a", "b", "c")
        first = router.route(prompt(0, 640))
        router.ended(first, prompt(0, 640))
        again = router.route(prompt(0, 640) + prompt(1))
        assert (again.replica, again.cached_tokens, again.rows) == (
            first.replica,
            640 - 384,
            384 + 64,
        )  # 64 blocks are remembered

    def test_a_hot_prefix_spreads_as_its_owner_gets_loaded(self) -> None:
        router = router_of("a", "b", "c", max_blocks=1000)
        counts = dict.fromkeys("abc", 0)
        for seed in range(60):
            counts[router.route(prompt(0, 256) + prompt(seed, 32)).replica] += 1
        assert min(counts.values()) >= 15

    def test_idle_replicas_that_are_alike_take_turns(self) -> None:
        router, chosen = router_of("a", "b", "c", "d"), []
        for seed in range(8):
            routed = router.route(prompt(seed))
            chosen.append(routed.replica)
            served(router, routed, prompt(seed))
        assert sorted(chosen[:4]) == sorted(chosen[4:]) == list("abcd")
        assert router_of("a", "b", "c", first=2).route(prompt(0)).replica == "c"

    def test_decoding_sequences_count(self) -> None:
        router = router_of("a", "b")
        for seed in range(4):
            router.first_token(router.route(prompt(seed), among=["a"]))
        assert {router.route(prompt(seed, 4)).replica for seed in range(10, 12)} == {"b"}

    def test_where_all_sequences_run_that_may_the_next_waits(self) -> None:
        router = router_of("a", "b")
        router.ended(
            router.route(prompt(0), among=["b"]), prompt(0) + prompt(1, 100)
        )  # outputs are not short
        times = []
        for seed in range(COST.max_num_seqs + 3):
            routed = router.route(prompt(seed, 8), among=["a"])
            router.first_token(routed)
            times.append(routed.seconds)
        steps = [after - before for before, after in pairwise(times)]
        assert min(steps[COST.max_num_seqs - 1 :]) > max(steps[: COST.max_num_seqs - 1])

    def test_a_slower_replica_gets_less(self) -> None:
        router = router_of("slow", "fast")
        router.join("slow", "1", StepCost(0.03, 0.0003, 0.0015, 64, 8))
        counts = dict.fromkeys(("slow", "fast"), 0)
        for seed in range(40):
            counts[router.route(prompt(seed)).replica] += 1
        assert 2 * counts["slow"] <= counts["fast"] and counts["slow"] >= 4

    def test_a_replica_that_fails_fast_does_not_draw_the_rest(self) -> None:
        router, chosen = router_of("bad", "good"), []
        for seed in range(60):
            routed = router.route(prompt(seed))
            chosen.append(routed.replica)
            if routed.replica == "bad":
                router.failed(routed)
            else:
                served(router, routed, prompt(seed))
        assert chosen.count("bad") <= 12
        for seed in range(60, 600):  # it is tried again, and well
            routed = router.route(prompt(seed))
            chosen.append(routed.replica)
            served(router, routed, prompt(seed))
        assert 40 <= chosen[-100:].count("bad") <= 60

    def test_a_newcomer_is_not_flooded(self) -> None:
        router, chosen = router_of("a", "b", "c"), []
        for seed in range(200):
            routed = router.route(prompt(seed))
            served(router, routed, prompt(seed))
        router.join("new", "1", COST)
        for seed in range(200, 216):
            routed = router.route(prompt(seed))
            chosen.append(routed.replica)
            served(router, routed, prompt(seed))
        assert 2 <= chosen.count("new") <= 6


class TestReports:
    def test_what_others_sent_there_counts(self) -> None:
        router = router_of("a", "b")
        router.report("a", queued_rows=500, running=4)
        assert {router.route(prompt(seed)).replica for seed in range(4)} == {"b"}

    def test_what_is_done_is_not_taken_twice(self) -> None:
        router = router_of("a", "b")
        own = router.route(prompt(0), among=["a"])
        router.report("a", queued_rows=10, running=1)  # of its own request a part is done
        router.first_token(own)
        router.ended(own, prompt(0))
        more = router.route(prompt(1, 600), among=["a"])
        assert more.seconds == router.route(prompt(1, 600), among=["b"]).seconds


class TestBadInput:
    @pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 1.5, "a", None])
    @pytest.mark.parametrize("length", [3, 63, 64])
    def test_what_is_no_token_id_changes_nothing(self, token: Any, length: int) -> None:
        router = router_of("a")
        with pytest.raises(RequestError, match="token ids"):
            router.route([*prompt(0, length), token])
        assert (router.running("a"), router.queued_rows("a"), router.num_blocks) == (0, 0, 0)

    def test_scopes_that_look_alike_are_not(self) -> None:
        router = router_of("a")
        for scope in (
            (None, None),
            ("null", None),
            ('"', None),
            (None, "null"),
            ("a", "b"),
            ('a", "b', None),
            ("", None),
            (None, ""),
        ):
            assert router.route(prompt(0), scope).cached_tokens == 0

    @pytest.mark.parametrize(
        "wrong",
        [
            {"step_seconds": 0.0},
            {"row_seconds": -1.0},
            {"sequence_seconds": float("nan")},
            {"chunk": 0},
        ],
    )
    def test_costs(self, wrong: dict[str, float]) -> None:
        with pytest.raises(RequestError, match="a step takes"):
            StepCost(**{"step_seconds": 0.01, "row_seconds": 0.0001} | wrong)  # type: ignore[arg-type]

    def test_sizes(self) -> None:
        with pytest.raises(RequestError, match="block_size must be 1 or more"):
            router_of(block_size=0)
