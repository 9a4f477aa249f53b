"""The whole engine as a state machine over a toy model.

Requests, some of them beam searches, arrive, run, are preempted, aborted and finished. After every
rule free and held blocks add up, no block is shared wrongly, and the KV content is right. At the
end all blocks are free, and every finished request has the tokens of plain decoding or of the naive
beam search.
"""

from typing import Any, get_args

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from headrace.batch import Commit, DraftTree
from headrace.engine.sequence import Sequence
from headrace.errors import RequestError
from headrace.logit_ops import StepResult
from headrace.outputs import Update
from headrace.proposer import Proposer
from headrace.request import PathOptions, Pooling, PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams
from tests.acceptors.beam_twin import beam_search
from tests.engine.toy import VOCAB, plain_decoding, toy_engine, toy_logits, toy_vector
from tests.random_trees import RandomTrees

MAX_MODEL_LEN = 40
STEMS = [[1, 2, 3] * 8, [1, 2, 3, 4] * 6, [5] * 24]


class Unruly(RandomTrees):
    """Proposes random trees, and sometimes invalid drafts."""

    def propose(self, seqs: list[Any], budgets: list[int]) -> list[DraftTree]:
        mood = self._random.random()
        if mood < 0.05:
            raise RuntimeError
        drafts = super().propose(seqs, budgets)
        return (
            drafts
            if mood < 0.9
            else [DraftTree(draft.tokens, [0 for _ in draft.parents]) for draft in drafts]
        )

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None:
        if self._random.random() < 0.05:
            raise RuntimeError


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 5])),
        temperature=draw(st.sampled_from([0.0, 0.8])),
        seed=draw(st.integers(0, 2**64 - 1)),
        top_k=draw(st.sampled_from([0, 5])),
        presence_penalty=draw(st.sampled_from([0.0, 1.0])),
        max_tokens=draw(st.integers(1, 20)),
        logprobs=draw(st.sampled_from([None, 1])),
        prompt_logprobs=draw(st.sampled_from([None, None, 2])),
    )


@st.composite
def searching(draw: st.DrawFn) -> SamplingParams:
    width = draw(st.integers(1, 5))
    return SamplingParams(
        beam_width=width,
        n=draw(st.integers(1, width)),
        length_penalty=draw(st.sampled_from([0.0, 1.0, 2.0])),
        early_stopping=draw(st.booleans()),
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)),
        presence_penalty=draw(st.sampled_from([0.0, 1.0])),
        max_tokens=draw(st.integers(1, 16)),
        logprobs=draw(st.sampled_from([None, 1])),
        prompt_logprobs=draw(st.sampled_from([None, None, 2])),
    )


WINDOWS = st.sampled_from([(0,), (0,), (0, 2), (0, 5), (3, 0, 9), (4,), (2, 7)])
SHAPES: dict[str, st.SearchStrategy[Any]] = {
    "windows": WINDOWS,
    "sinks": st.sampled_from([0, 0, 1, 5]),
    "num_blocks": st.integers(4, 30),
    "block_size": st.sampled_from([1, 3, 4]),
    "max_num_seqs": st.integers(1, 6),
    "max_num_batched_tokens": st.integers(1, 25),
    "max_logit_rows": st.integers(1, 12),
    "chunked_prefill_size": st.integers(1, 12),
    "multi_step_ms": st.sampled_from([0, 1e6]),
    "prefix_cache": st.booleans(),
    "late": st.booleans(),
}
"""Of an engine: small, so that everything runs out."""


def touched(window: int, rows: int, size: int) -> int:
    """Max blocks of `size` tokens that `rows` rows and the window of the first row can touch."""
    return max(
        len({i // size for i in range(first, first + window - 1 + rows)}) for first in range(size)
    )


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.truth: dict[tuple[int, int], list[int]] = {}
        self.params: dict[str, SamplingParams] = {}
        self.finished: dict[str, Update] = {}
        self.vectors: dict[str, NDArray[np.float32]] = {}
        self.prompt_lens: list[int] = []

    @initialize(
        target_token_ms=st.sampled_from([0, 0, 0, 1e-6, 0.2]),
        seed=st.integers(0, 99),
        max_nodes=st.sampled_from([0, 6, 70]),
        **SHAPES,
    )
    def start(self, seed: int, max_nodes: int, **config: Any) -> None:
        self.begin(Unruly(seed, VOCAB, self.truth, max_nodes), **config)

    def begin(self, proposer: Proposer, **config: Any) -> None:
        """Start an engine; machines with other proposers share this."""
        self.config = config
        self.with_drafts = proposer.traits.max_nodes > 0
        self.engine = toy_engine(max_model_len=MAX_MODEL_LEN, proposer=proposer, **config)

    @rule(
        stem=st.integers(0, 2),
        shared=st.integers(0, 24),
        rest=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
        params=st.one_of(sampling(), searching()),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "a"]),
        keeps=st.booleans(),
    )
    def add(
        self,
        stem: int,
        shared: int,
        rest: list[int],
        params: SamplingParams,
        priority: int,
        salt: str | None,
        keeps: bool = False,
    ) -> None:
        prompt = STEMS[stem][:shared] + rest
        path = None
        if keeps and self.config["prefix_cache"] and params.beam_width is None:
            number = len(self.prompt_lens)
            path = PathOptions(keep=[f"{number}/{index}" for index in range(params.n)])
        try:
            request_id = self.engine.add_request(
                prompt,
                params,
                options=RequestOptions(priority=priority, cache_salt=salt, path=path),
            )
        except RequestError as error:
            longest = min(MAX_MODEL_LEN, len(prompt) + (params.max_tokens or 0)) - 1
            width, size = params.beam_width or 1, self.config["block_size"]
            shared, whole = len(prompt) // size, -(-longest // size)
            rows, sinks = (
                self.config["max_num_batched_tokens"],
                -(-self.config.get("sinks", 0) // size),
            )
            needed = max(
                width * min(whole, sinks + touched(window, rows, size))
                if window
                else shared + width * (whole - shared)
                for window in self.config["windows"]
            )
            num_running = min(self.config["max_num_seqs"], rows)
            assert needed > self.config["num_blocks"] or width > num_running, error
            return
        number = len(self.prompt_lens)
        if params.beam_width is None:
            for index in range(params.n):
                self.truth[number, index] = plain_decoding(prompt, params, index, MAX_MODEL_LEN)
        else:
            for index, beam in enumerate(
                beam_search(prompt, params, toy_logits, VOCAB, MAX_MODEL_LEN)
            ):
                self.truth[number, index] = prompt + beam.tokens
        self.params[request_id] = params
        self.prompt_lens.append(len(prompt))

    @rule(
        stem=st.integers(0, 2),
        size=st.integers(1, 24),
        how=st.sampled_from(get_args(Pooling)),
        salt=st.sampled_from([None, "a"]),
    )
    def embed(self, stem: int, size: int, how: Pooling, salt: str | None) -> None:
        prompt, params = STEMS[stem][:size], PoolingParams(pooling=how)
        try:
            request_id = self.engine.add(
                self.engine.check(prompt, pooling=params, options=RequestOptions(cache_salt=salt))
            )
        except RequestError:  # `add` checks refusals
            return
        self.vectors[request_id] = toy_vector(prompt, how)
        self.params[request_id] = SamplingParams(max_tokens=1)
        self.truth[len(self.prompt_lens), 0] = prompt
        self.prompt_lens.append(len(prompt))

    @precondition(lambda self: getattr(self, "prompt_lens", None))
    @rule(number=st.integers(0, 20), index=st.integers(0, 4))
    def release(self, number: int, index: int) -> None:
        self.engine.release([f"{number % len(self.prompt_lens)}/{index}"])

    @rule(steps=st.integers(1, 10))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    @precondition(lambda self: getattr(self, "params", None))
    @rule(which=st.integers(0))
    def abort(self, which: int) -> None:
        request_id = list(self.params)[which % len(self.params)]
        result = self.engine.abort(request_id)
        assert (result is None) == (request_id in self.finished)
        if result is not None:
            searched = self.params[request_id].beam_width is not None
            assert all(
                output.finish_reason in ("abort", "stop" if searched else "length")
                for output in result.outputs
            )
            if not searched:  # the best so far need not be the beginning of the best
                self._check(int(request_id), result.outputs, complete=False)
            del self.params[request_id]
        assert self.engine.abort(request_id) is None

    @precondition(lambda self: getattr(self, "params", None))
    @rule(which=st.integers(0))
    def time_is_up(self, which: int) -> None:
        """Like `abort`, but the request ends in a step, with an update for each sequence."""
        request_id = list(self.params)[which % len(self.params)]
        if request_id in self.finished:
            return
        self.engine._deadlines.add(0.0, self.engine._requests[request_id])
        updates = self._updates()
        (result,) = [
            update.result for update in updates if update.result and update.request_id == request_id
        ]
        searched = self.params[request_id].beam_width is not None
        assert {output.finish_reason for output in result.outputs} <= {
            "timeout",
            "stop" if searched else "length",
        }
        if not searched:
            self._check(int(request_id), result.outputs, complete=False)
        del self.params[request_id]
        self._record([update for update in updates if update.request_id != request_id])

    @precondition(lambda self: hasattr(self, "engine") and not self.engine._scheduler.suspects)
    @rule(
        place=st.sampled_from(["launch", "_start", "fork", "_free", "replace_sequences", "finish"]),
        after=st.booleans(),
    )
    def step_fails(self, place: str, after: bool) -> None:
        """A function of a step fails once. No request is to blame, so all continue with the same
        tokens.
        """
        owner: Any = self.engine._loop.executable if place == "launch" else self.engine._scheduler
        function, failures = getattr(owner, place), self.engine.stats().failed_steps

        def fails(*args: Any, **options: Any) -> None:
            delattr(owner, place)
            if after:
                function(*args, **options)
            raise MemoryError

        setattr(owner, place, fails)
        self._record(self._updates())
        vars(owner).pop(place, None)
        assert self.engine.stats().failed_steps <= failures + 1

    @invariant()
    def blocks_add_up(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine._scheduler
        for queue in (scheduler.running, scheduler.waiting):
            assert [b.rank for b in queue] == sorted(b.rank for b in queue)
        assert all(not seq.tables and seq.computed == 0 for seq in scheduler.waiting)
        held = [seq.tables for seq in (*scheduler.running, *scheduler._dropped)]
        self.engine._kv.check([*held, *scheduler.kept.tables])
        assert all(seq.num_in_flight for seq in scheduler._dropped)
        executable: Any = self.engine._loop.executable
        for request in self.engine._requests.values():
            assert (
                not request.acceptor.is_group or len({len(seq.known) for seq in request.seqs}) == 1
            )
        for name, kept in scheduler.kept._paths.items():
            number, index = map(int, name.split("/"))
            num_tokens = kept.node.depth * self.engine._kv.block_size + len(kept.tail) // 4
            text = self.truth[number, index][:num_tokens]
            executable.check(self.engine._kv, kept.tables, text)
        for seq in scheduler.running:
            assert 0 <= seq.settled <= seq.computed < seq.length + (seq.request.pooling is not None)
            executable.check(self.engine._kv, seq.tables, seq.known[: seq.settled])

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        bound = 4000
        while self.engine.has_work:
            self._step()
            bound -= 1
            assert bound, "no end in sight"
        self.blocks_add_up()
        self.engine.release_all("")
        stats = self.engine.stats()
        assert not stats.kept_paths
        assert stats.blocks_free == stats.blocks_total
        assert stats.running == stats.waiting == 0
        assert self.finished.keys() == self.params.keys()

    def _updates(self) -> list[Update]:
        """Return the updates of a step, and check its preemptions.

        A victim never ranks before the sequence that needs a block, and never belongs to the group
        of the first sequence. It has sampled since its admission, if any candidate has. Otherwise a
        sequence could be preempted again and again without progress.
        """
        scheduler = self.engine._scheduler
        choose = scheduler._choose_victim

        def checked(needy: Sequence) -> Sequence:
            victim, first = choose(needy), scheduler.running[0].group
            others = [
                b
                for b in scheduler.running[scheduler.running.index(needy) :]
                if b.group is not first
            ]
            assert victim in others
            assert victim.has_sampled or not any(b.has_sampled for b in others)
            return victim

        scheduler._choose_victim = checked  # type: ignore[method-assign]
        try:
            return self.engine.step()
        finally:
            scheduler._choose_victim = choose  # type: ignore[method-assign]

    def _step(self) -> None:
        before = self.engine.stats()
        running = self.engine._scheduler.running
        waits = {
            seq.group for seq in running if seq.num_uncomputed > 1
        }  # a beam that is ready waits for the others
        decoding = sum(seq.group not in waits for seq in running)
        # A request that may have made a step fail runs alone, while others keep their blocks.
        alone = bool(self.engine._scheduler.suspects)
        self._record(self._updates())
        after = self.engine.stats()
        # Preemption for an urgent request may leave no sequence that decodes.
        preempted = after.preemptions > before.preemptions
        bounded = decoding and not preempted and not alone
        if bounded and not self.with_drafts and not self.config["late"]:
            # Prompts of one token that are admitted early count as decoding.
            chunk = self.config["chunked_prefill_size"]
            assert after.rows - before.rows <= 2 * (decoding + max(1, chunk // 4)) + chunk
        rows, logit_rows, seqs = self.engine._loop.executable.largest
        assert rows <= self.config["max_num_batched_tokens"] and seqs <= max(
            self.config["max_num_seqs"], 1
        )
        assert logit_rows <= self.config["max_num_seqs"] + self.config["max_logit_rows"]
        # It may have to leave for a request of a higher rank, which runs in the next step.
        left = alone and preempted
        assert after.steps > before.steps or left or self.config["late"] or not self.engine.has_work

    def _record(self, updates: list[Update]) -> None:
        for update in updates:
            if update.result:
                assert update.result.finished and update.result.error is None
                self.finished[update.request_id] = update
                self._check(int(update.request_id), update.result.outputs, complete=True)
                vector = self.vectors.get(update.request_id, np.zeros(0, np.float32))
                assert (
                    update.result.embedding if vector.size else vector
                ).tobytes() == vector.tobytes()
                expected = self.params[update.request_id].prompt_logprobs is not None
                assert (update.result.prompt_logprobs is not None) == expected
                if update.result.prompt_logprobs:
                    assert len(update.result.prompt_logprobs) == len(update.result.prompt_token_ids)

    def _check(self, number: int, outputs: list[Any], *, complete: bool) -> None:
        for output in outputs:
            assert output.index < self.params[str(number)].n
            expected = self.truth[number, output.index][self.prompt_lens[number] :]
            assert output.token_ids == (expected if complete else expected[: len(output.token_ids)])
            assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_beams_may_preempt_a_sequence_that_has_not_sampled() -> None:
    """All sequences that rank before the victim have sampled, but they belong to the first
    request.
    """
    life = Life()
    config = {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 3,
        "max_logit_rows": 1,
        "chunked_prefill_size": 1,
        "late": False,
    }
    life.begin(Unruly(0, VOCAB, life.truth, 0), **config)
    search = SamplingParams(temperature=1.0, beam_width=2, n=1, max_tokens=16, length_penalty=2.0)
    life.add(stem=0, shared=0, rest=[0], params=search, priority=0, salt=None)
    life.step(1)
    life.add(
        stem=0,
        shared=12,
        rest=[0],
        params=SamplingParams(temperature=0.0, max_tokens=4),
        priority=0,
        salt=None,
    )
    life.teardown()
    assert life.engine.stats().preemptions == 1
