"""The prefix router: its bookkeeping against a simple model, and its choices."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import NoReplicaError, RequestError
from headrace.scaleout.prefix_router import PrefixRouter, RoutedRequest
from headrace.scaleout.prefix_tree import CacheScope
from headrace.scaleout.replica_speed import ReplicaSpeed

SPEED = ReplicaSpeed(
    step_seconds=0.01, row_seconds=0.0001, sequence_seconds=0.0005, chunk_size=64, max_num_seqs=8
)
NAMES = ("a", "b", "c", "d")
SCOPES: tuple[CacheScope | None, ...] = (
    None,
    ("tenant", None),
    (None, "adapter"),
    ("tenant", "adapter"),
    ("other", None),
)
TOKENS = st.lists(st.integers(0, 1), max_size=24)
Prefix = tuple[CacheScope, tuple[int, ...]]


class Model:
    """A replica's cache and requests in plain lists: prefixes of full blocks by last use."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.prefixes: list[Prefix] = []
        self.running: dict[int, int] = {}
        """Queued rows of each request."""

    def use(self, scope: CacheScope, tokens: list[int], size: int, max_blocks: int) -> None:
        for blocks in reversed(range(1, min(len(tokens) // size, max_blocks) + 1)):
            prefix = scope, tuple(tokens[: blocks * size])
            self.prefixes = [other for other in self.prefixes if other != prefix] + [prefix]
        self.prefixes = self.prefixes[max(0, len(self.prefixes) - max_blocks) :]

    def cached(self, scope: CacheScope, tokens: list[int], size: int) -> int:
        lengths = range(size, len(tokens), size)
        held = [length for length in lengths if (scope, tuple(tokens[:length])) in self.prefixes]
        return max(held, default=0)


class RouterMachine(RuleBasedStateMachine):
    """Replicas join, leave and restart; requests start and end in any order."""

    @initialize(
        size=st.integers(1, 4), max_blocks=st.integers(1, 8), first_replica=st.integers(0, 5)
    )
    def start(self, size: int, max_blocks: int, first_replica: int) -> None:
        self.size, self.max_blocks = size, max_blocks
        self.router = PrefixRouter(size, max_blocks, first_replica)
        self.models: dict[str, Model] = {}
        self.routed: list[tuple[RoutedRequest, list[int], CacheScope]] = []

    @rule(
        name=st.sampled_from(NAMES),
        boot_id=st.sampled_from("12"),
        speed=st.sampled_from([SPEED, replace(SPEED, row_seconds=0.001)]),
    )
    def join(self, name: str, boot_id: str, speed: ReplicaSpeed) -> None:
        self.router.join(name, boot_id, speed)
        if name not in self.models or self.models[name].boot_id != boot_id:
            self.models[name] = Model(boot_id)

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.router.leave(name)
        self.models.pop(name, None)

    @rule(
        tokens=TOKENS,
        scope=st.sampled_from(SCOPES),
        candidates=st.none() | st.sets(st.sampled_from([*NAMES, "unknown"])),
    )
    def route(
        self, tokens: list[int], scope: CacheScope | None, candidates: set[str] | None
    ) -> None:
        possible = set(self.models) if candidates is None else candidates & set(self.models)
        if not possible:
            with pytest.raises(NoReplicaError):
                self.router.route(tokens, scope, candidates)
            return
        routed, key = self.router.route(tokens, scope, candidates), scope or (None, None)
        assert routed.replica in possible
        model = self.models[routed.replica]
        assert routed.cached_tokens == model.cached(key, tokens, self.size)
        assert routed.rows == len(tokens) - routed.cached_tokens
        assert routed.seconds > 0
        model.use(key, tokens, self.size, self.max_blocks)
        model.running[routed.number] = routed.rows
        self.routed.append((routed, tokens, key))

    @precondition(lambda self: self.routed)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        routed, _, _ = data.draw(st.sampled_from(self.routed))
        self.router.first_token(routed)
        for model in self.models.values():
            if routed.number in model.running:
                model.running[routed.number] = 0

    @precondition(lambda self: self.routed)
    @rule(data=st.data(), output=TOKENS, way=st.sampled_from(["tokens", "unknown", "failed"]))
    def end(self, data: st.DataObject, output: list[int], way: str) -> None:
        """End a request, perhaps for the second time or after its replica has left."""
        routed, tokens, scope = data.draw(st.sampled_from(self.routed))
        if way == "failed":
            self.router.failed(routed)
        else:
            self.router.ended(routed, tokens + output if way == "tokens" else None)
        for model in self.models.values():
            rows = model.running.pop(routed.number, None)
            if rows is not None and way == "tokens":
                model.use(scope, (tokens + output)[:-1], self.size, self.max_blocks)

    @rule(name=st.sampled_from(NAMES), queued=st.integers(0, 50), running=st.integers(0, 5))
    def observe(self, name: str, queued: int, running: int) -> None:
        self.router.observe(name, queued, running)

    @invariant()
    def counts_equal_the_model(self) -> None:
        assert set(self.router.replicas) == set(self.models)
        for name, model in self.models.items():
            assert self.router.running(name) == len(model.running)
            assert self.router.queued_rows(name) == sum(model.running.values())
            assert self.router.num_cached(name) == len(model.prefixes) <= self.max_blocks

    @invariant()
    def tree_has_the_blocks_of_the_model(self) -> None:
        assert self.router.num_blocks == len(
            {prefix for model in self.models.values() for prefix in model.prefixes}
        )

    def teardown(self) -> None:
        for routed, _, _ in self.routed:
            self.router.ended(routed)
        assert all(
            self.router.running(name) == self.router.queued_rows(name) == 0 for name in self.models
        )
        for name in list(self.models):
            self.router.leave(name)
        assert self.router.num_blocks == 0


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def make_router(*names: str, **options: Any) -> PrefixRouter:
    router = PrefixRouter(**{"block_size": 4, "max_blocks": 64} | options)
    for name in names:
        router.join(name, "1", SPEED)
    return router


def prompt(seed: int, length: int = 64) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def run_to_end(router: PrefixRouter, routed: RoutedRequest, tokens: list[int]) -> None:
    router.first_token(routed)
    router.ended(routed, tokens)


class TestChoice:
    def test_prompt_goes_to_the_replica_with_its_prefix(self) -> None:
        router = make_router("a", "b", "c")
        first = router.route(prompt(0, 640))
        router.ended(first, prompt(0, 640))
        again = router.route(prompt(0, 640) + prompt(1))
        assert (again.replica, again.cached_tokens, again.rows) == (
            first.replica,
            640 - 384,
            384 + 64,
        )  # the router remembers 64 blocks

    def test_hot_prefix_spreads_when_its_replica_is_loaded(self) -> None:
        router = make_router("a", "b", "c", max_blocks=1000)
        counts = dict.fromkeys("abc", 0)
        for seed in range(60):
            counts[router.route(prompt(0, 256) + prompt(seed, 32)).replica] += 1
        assert min(counts.values()) >= 15

    def test_idle_equal_replicas_take_turns(self) -> None:
        router, chosen = make_router("a", "b", "c", "d"), []
        for seed in range(8):
            routed = router.route(prompt(seed))
            chosen.append(routed.replica)
            run_to_end(router, routed, prompt(seed))
        assert sorted(chosen[:4]) == sorted(chosen[4:]) == list("abcd")
        assert make_router("a", "b", "c", first_replica=2).route(prompt(0)).replica == "c"

    def test_decoding_sequences_add_to_the_expected_time(self) -> None:
        router = make_router("a", "b")
        for seed in range(4):
            router.first_token(router.route(prompt(seed), candidates=["a"]))
        assert {router.route(prompt(seed, 4)).replica for seed in range(10, 12)} == {"b"}

    def test_request_above_max_num_seqs_waits_for_an_end(self) -> None:
        router = make_router("a", "b")
        router.ended(
            router.route(prompt(0), candidates=["b"]), prompt(0) + prompt(1, 100)
        )  # teaches the router that outputs are long
        times = []
        for seed in range(SPEED.max_num_seqs + 3):
            routed = router.route(prompt(seed, 8), candidates=["a"])
            router.first_token(routed)
            times.append(routed.seconds)
        steps = [after - before for before, after in pairwise(times)]
        assert min(steps[SPEED.max_num_seqs - 1 :]) > max(steps[: SPEED.max_num_seqs - 1])

    def test_slow_replica_gets_fewer_requests(self) -> None:
        router = make_router("slow", "fast")
        router.join(
            "slow",
            "1",
            replace(SPEED, step_seconds=0.03, row_seconds=0.0003, sequence_seconds=0.0015),
        )
        counts = dict.fromkeys(("slow", "fast"), 0)
        for seed in range(40):
            counts[router.route(prompt(seed)).replica] += 1
        assert 2 * counts["slow"] <= counts["fast"] and counts["slow"] >= 4

    def test_failing_replica_does_not_attract_requests(self) -> None:
        router, chosen = make_router("bad", "good"), []
        for seed in range(60):
            routed = router.route(prompt(seed))
            chosen.append(routed.replica)
            if routed.replica == "bad":
                router.failed(routed)
            else:
                run_to_end(router, routed, prompt(seed))
        assert chosen.count("bad") <= 12
        for seed in range(60, 600):  # the replica is tried again, and succeeds
            routed = router.route(prompt(seed))
            chosen.append(routed.replica)
            run_to_end(router, routed, prompt(seed))
        assert 40 <= chosen[-100:].count("bad") <= 60

    def test_new_replica_is_not_flooded(self) -> None:
        router, chosen = make_router("a", "b", "c"), []
        for seed in range(200):
            routed = router.route(prompt(seed))
            run_to_end(router, routed, prompt(seed))
        router.join("new", "1", SPEED)
        for seed in range(200, 216):
            routed = router.route(prompt(seed))
            chosen.append(routed.replica)
            run_to_end(router, routed, prompt(seed))
        assert 2 <= chosen.count("new") <= 6


class TestObserve:
    def test_requests_of_other_routers_count(self) -> None:
        router = make_router("a", "b")
        router.observe("a", queued_rows=500, running=4)
        assert {router.route(prompt(seed)).replica for seed in range(4)} == {"b"}

    def test_observed_progress_is_not_subtracted_twice(self) -> None:
        router = make_router("a", "b")
        own = router.route(prompt(0), candidates=["a"])
        router.observe(
            "a", queued_rows=10, running=1
        )  # the replica has computed a part of the request
        router.first_token(own)
        router.ended(own, prompt(0))
        more = router.route(prompt(1, 600), candidates=["a"])
        assert more.seconds == router.route(prompt(1, 600), candidates=["b"]).seconds


class TestInvalidInput:
    @pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 1.5, "a", None])
    @pytest.mark.parametrize("length", [3, 63, 64])
    def test_invalid_token_id_changes_no_state(self, token: Any, length: int) -> None:
        router = make_router("a")
        with pytest.raises(RequestError, match="token ids"):
            router.route([*prompt(0, length), token])
        assert (router.running("a"), router.queued_rows("a"), router.num_blocks) == (0, 0, 0)

    def test_scopes_with_similar_names_differ(self) -> None:
        router = make_router("a")
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
            {"chunk_size": 0},
        ],
    )
    def test_replica_speed_out_of_range(self, wrong: dict[str, float]) -> None:
        with pytest.raises(RequestError, match="is out of range"):
            ReplicaSpeed(**{"step_seconds": 0.01, "row_seconds": 0.0001} | wrong)  # type: ignore[arg-type]

    def test_block_size_out_of_range(self) -> None:
        with pytest.raises(RequestError, match="block_size must be 1 or more"):
            make_router(block_size=0)
