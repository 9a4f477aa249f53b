"""EAGLE-3 drafts: equal to the published equations, also after forks, prefix hits and pauses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.config import KvConfig
from headrace.loader.drafts import compile_drafter
from headrace.logit_ops import StepResult
from headrace.quant.formats import StoredTensor
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers import eagle
from headrace.speculation.proposers.eagle import EagleProposer
from tests.draft_engines import draft_engine
from tests.drafters import Eagle1Twin, Twin, random_drafter, random_eagle1
from tests.engine.test_promise import same
from tests.tiny import drain, run_all, tiny_engine, tiny_model

MODEL = tiny_model(4, layers=3)
TAPS = (0, 1, 2)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=20, ignore_eos=True)
SEVERAL = SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True)
PROMPTS = [[7, 8, 9, 7, 8], [3], [token % 61 for token in range(70)]]


class Witness:
    """Compares each draft of a proposer with the NumPy twin, over the rows that it observed."""

    def __init__(self, proposer: Any, twin: Twin, depth: int) -> None:
        self.num_drafts = 0
        self._proposer, self._twin, self._depth = proposer, twin, depth
        self._rows: dict[Any, dict[int, NDArray[np.float32]]] = {}

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None:
        assert result.taps is not None
        for commit in commits:
            rows = [*commit.rows, *(commit.rows.stop + node for node in commit.path)]
            seen = self._rows.setdefault(seqs[commit.source], {})
            for position, row in enumerate(rows, commit.position):
                seen.setdefault(position, result.taps[row].copy())
        self._proposer.observe(seqs, commits, result)

    def propose(self, seqs: list[Any], budgets: list[int], *rest: Any) -> list[DraftTree]:
        drafts = self._proposer.propose(seqs, budgets, *rest)
        for seq, draft, budget in zip(seqs, drafts, budgets, strict=True):
            seen = self._rows.get(seq, {})
            if not draft.tokens or min(seen) > 0:
                continue
            taps = np.array([seen[position] for position in range(len(seq.known) - 1)], np.float64)
            depth = min(self._depth, budget)
            assert draft.tokens == self._twin.draft(seq.known, taps, depth)
            self.num_drafts += 1
        return drafts


class Recorder:
    """Records the drafts of a proposer."""

    def __init__(self, proposer: Any) -> None:
        self.drafts: list[list[int]] = []
        self.observe = proposer.observe
        self._propose = proposer.propose

    def propose(self, seqs: list[Any], budgets: list[int], *rest: Any) -> list[DraftTree]:
        drafts: list[DraftTree] = self._propose(seqs, budgets, *rest)
        self.drafts += [draft.tokens for draft in drafts]
        return drafts


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("vocab", [0, 20], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_eagle_drafts_equal_the_published_equations(
    backend: str, vocab: int, norm_before_residual: bool
) -> None:
    drafter = random_drafter(
        MODEL, vocab=vocab, taps=TAPS, norm_before_residual=norm_before_residual
    )
    engine, _ = draft_engine(
        MODEL, "draft_model", backend, drafter=drafter, depth=3, max_num_batched_tokens=32
    )
    guard = engine._speculation._guards["draft_model"]
    witness = guard._proposer = Witness(guard._proposer, Twin(drafter), 3)
    results = run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    plain = run_all(
        tiny_engine(MODEL, backend, kv_dtype="f32"), [(prompt, GREEDY) for prompt in PROMPTS]
    )
    for one, other in zip(results, plain, strict=True):
        same(one, other, exact=backend == "cpu")
    assert witness.num_drafts > 30 and engine.stats().proposer_failures == 0


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("fuse_bias", [False, True])
def test_eagle1_drafts_equal_the_published_equations(backend: str, fuse_bias: bool) -> None:
    drafter = random_eagle1(MODEL, fuse_bias=fuse_bias)
    engine, _ = draft_engine(
        MODEL, "draft_model", backend, drafter=drafter, depth=3, max_num_batched_tokens=32
    )
    guard = engine._speculation._guards["draft_model"]
    witness = guard._proposer = Witness(guard._proposer, Eagle1Twin(drafter), 3)
    requests = [(prompt, GREEDY) for prompt in PROMPTS]
    plain = run_all(tiny_engine(MODEL, backend, kv_dtype="f32"), requests)
    for one, other in zip(run_all(engine, requests), plain, strict=True):
        same(one, other, exact=backend == "cpu")
    assert witness.num_drafts > 30 and engine.stats().proposer_failures == 0


@pytest.mark.parametrize("taps", [(1,), (0, 2), (2, 0, 1, 1)])
def test_eagle_reads_any_number_of_taps(taps: Sequence[int]) -> None:
    engine, _ = draft_engine(MODEL, "draft_model", drafter=random_drafter(MODEL, taps=taps))
    run_all(engine, [(PROMPTS[0], GREEDY)])
    stats = engine.stats()
    assert stats.drafted > 0 and stats.proposer_failures == 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SEVERAL], ids=["greedy", "sampled", "n"])
@pytest.mark.parametrize("width", [1, 3])
def test_eagle_changes_no_token(params: SamplingParams, width: int) -> None:
    requests = [(prompt, params) for prompt in PROMPTS]
    engine, proposers = draft_engine(
        MODEL, "draft_model", drafter=random_drafter(MODEL, vocab=20, taps=TAPS), width=width
    )
    plain = run_all(tiny_engine(MODEL, "cpu", kv_dtype="f32"), requests)
    for one, other in zip(run_all(engine, requests), plain, strict=True):
        same(one, other, exact=True)
    stats, proposer = engine.stats(), proposers["draft_model"]
    assert isinstance(proposer, EagleProposer)
    assert stats.drafted > 0 and stats.proposer_failures == 0
    assert all(pool.num_free == pool.num_blocks for pool in proposer.kv.pools)


def test_eagle_drafts_after_a_prefix_hit_and_after_preemption() -> None:
    """A sequence drafts from the rows that it computed, whatever came before them."""
    drafter = random_drafter(MODEL, taps=TAPS)
    requests = [([*range(1, 50), last], GREEDY) for last in (3, 4, 5)]
    plain = [
        run_all(tiny_engine(MODEL, "cpu", kv_dtype="f32", prefix_cache=False), [request])[0]
        for request in requests
    ]
    for slots in (256, 128):
        engine, _ = draft_engine(MODEL, "draft_model", drafter=drafter, slots=slots)
        drafted = 0
        for request, expected in zip(requests, plain, strict=True):
            same(run_all(engine, [request])[0], expected, exact=True)
            assert engine.stats().drafted > drafted
            drafted = engine.stats().drafted
        for one, other in zip(run_all(engine, requests), plain, strict=True):
            same(one, other, exact=True)
        stats = engine.stats()
        assert stats.cached_tokens > 0 and stats.proposer_failures == 0
        assert slots == 256 or stats.preemptions > 0


def test_eagle_keeps_pairs_for_prompts_that_begin_alike() -> None:
    """After a prefix hit the drafts are those of a sequence that computed its whole prompt."""
    drafter = random_drafter(MODEL, taps=TAPS)
    prompt = [token % 61 for token in range(75)]
    engine, _ = draft_engine(MODEL, "draft_model", drafter=drafter, depth=3, slots=512)
    guard = engine._speculation._guards["draft_model"]
    guard._proposer = recorder = Recorder(guard._proposer)
    drafts: list[list[list[int]]] = []
    for salt in (None, None, "other"):
        start = len(recorder.drafts)
        options = RequestOptions(cache_salt=salt)
        engine.add_request(prompt, GREEDY, options)
        drain(engine)
        drafts.append(recorder.drafts[start:])
    stats = engine.stats()
    assert stats.cached_tokens == 64 and stats.proposer_failures == 0
    assert [draft for draft in drafts[0] if draft] == [draft for draft in drafts[1] if draft]
    assert drafts[2] == drafts[0]

    # Another second block: the pairs of the first block are shared, and a gap is left out.
    engine.add_request([*prompt[:33], *prompt[40:]], GREEDY)
    drain(engine)
    assert engine.stats().cached_tokens == 96 and engine.stats().proposer_failures == 0


def test_eagle_computes_a_long_prompt_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any limits of waiting rows and of rows in a launch give the same drafts."""
    drafter = random_drafter(MODEL, taps=TAPS)
    proposed: list[list[list[int]]] = []
    for waiting, rows in ((128, 512), (4, 512), (2, 3), (64, 8)):
        monkeypatch.setattr(eagle, "_MAX_WAITING", waiting)
        monkeypatch.setattr(eagle, "_MAX_ROWS", rows)
        engine, _ = draft_engine(MODEL, "draft_model", drafter=drafter, depth=2)
        guard = engine._speculation._guards["draft_model"]
        guard._proposer = recorder = Recorder(guard._proposer)
        run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])
        assert engine.stats().proposer_failures == 0
        proposed.append(recorder.drafts)
    assert any(map(len, proposed[0]))
    assert all(drafts == proposed[0] for drafts in proposed)


def test_eagle_takes_blocks_of_sequences_that_do_not_draft() -> None:
    drafter = random_drafter(MODEL, taps=TAPS)
    engine, proposers = draft_engine(
        MODEL, "draft_model", drafter=drafter, draft_slots=96, slots=512, max_num_seqs=2
    )
    run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS * 2])
    stats, proposer = engine.stats(), proposers["draft_model"]
    assert isinstance(proposer, EagleProposer)
    assert stats.drafted > 0 and stats.proposer_failures == 0
    assert all(pool.num_free == pool.num_blocks for pool in proposer.kv.pools)


def test_eagle_with_a_wrong_number_drafts_nothing() -> None:
    """Weights are checked when a folder is opened; numbers may still overflow."""
    drafter = random_drafter(MODEL, taps=TAPS)
    broken = drafter.tensors["norm"].dequantise()
    broken[:] = np.nan
    tensors = {**drafter.tensors, "norm": StoredTensor.from_floats("norm", broken)}
    broken_drafter = type(drafter)(drafter.spec, tensors, drafter.tokens)
    engine, _ = draft_engine(MODEL, "draft_model", drafter=broken_drafter)
    run_all(engine, [(PROMPTS[0], GREEDY)])
    stats = engine.stats()
    assert stats.drafted == 0 and stats.proposer_failures == 0


def test_eagle_has_no_draft_without_the_row_of_the_last_token() -> None:
    engine, proposers = draft_engine(MODEL, "draft_model", drafter=random_drafter(MODEL, taps=TAPS))
    proposer = proposers["draft_model"]
    engine.add_request([1, 2], GREEDY)
    engine.step()
    (seq,) = engine._scheduler.running
    assert proposer.propose([seq], [4])[0].tokens
    seq.known.append(1)
    assert proposer.propose([seq], [4]) == [NO_DRAFT]
    seq.known.pop()
    engine.close()


class Idle:
    """Lets a proposer draft for sequences of at least some tokens only."""

    def __init__(self, proposer: Any, min_tokens: int) -> None:
        self.observe = proposer.observe
        self._propose, self._min_tokens = proposer.propose, min_tokens

    def propose(self, seqs: list[Any], budgets: list[int], *rest: Any) -> list[DraftTree]:
        if len(seqs[0].known) < self._min_tokens:
            return [NO_DRAFT] * len(seqs)
        drafts: list[DraftTree] = self._propose(seqs, budgets, *rest)
        return drafts


def test_an_idle_drafter_computes_no_output_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes the prompt, once drops old rows of the output, and drafts after the gap."""
    monkeypatch.setattr(eagle, "_MAX_WAITING", 8)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    request = (list(range(30)), params)
    launches: list[int] = []
    for min_tokens in (1000, 80):
        engine, proposers = draft_engine(
            MODEL, "draft_model", drafter=random_drafter(MODEL, taps=TAPS), slots=512
        )
        proposer = proposers["draft_model"]
        assert isinstance(proposer, EagleProposer)
        guard = engine._speculation._guards["draft_model"]
        guard._proposer = Idle(proposer, min_tokens)
        launch = proposer._programs.from_target.launch

        def counted(batch: Any, ops: Any, launch: Any = launch) -> StepResult:
            launches.append(len(batch.tokens))
            result: StepResult = launch(batch, ops)
            return result

        monkeypatch.setattr(proposer._programs.from_target, "launch", counted)
        (result,) = run_all(engine, [request])
        (plain,) = run_all(tiny_engine(MODEL, "cpu", kv_dtype="f32"), [request])
        same(result, plain, exact=True)
        stats = engine.stats()
        assert stats.proposer_failures == 0 and (stats.drafted > 0) == (min_tokens < 1000)
        if min_tokens == 1000:
            assert sum(launches) < 30 + 8  # the rows of the prompt, and a few more


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SEVERAL], ids=["greedy", "sampled", "n"])
@pytest.mark.parametrize("every", [2, 5])
def test_new_weights_in_the_middle_of_requests_change_no_token(
    params: SamplingParams, every: int
) -> None:
    requests = [(prompt, params) for prompt in PROMPTS]
    drafters = [random_drafter(MODEL, seed, vocab=20, taps=TAPS) for seed in range(3)]
    engine, proposers = draft_engine(MODEL, "draft_model", drafter=drafters[0])
    proposer = proposers["draft_model"]
    assert isinstance(proposer, EagleProposer)
    plain = run_all(tiny_engine(MODEL, "cpu", kv_dtype="f32"), requests)

    kv = KvConfig((8,), 32, "f32")
    results, num_steps = {}, 0
    ids = [engine.add_request(prompt, params) for prompt, params in requests]
    while engine.has_work:
        for update in engine.step():
            if update.result:
                results[update.request_id] = update.result
        num_steps += 1
        if num_steps % every == 0:
            executable = engine._loop.executable
            new = drafters[num_steps // every % 3]
            proposer.use(compile_drafter(new, MODEL[0], executable, kv, 4))
            engine._speculation.forget("draft_model")
    for request_id, expected in zip(ids, plain, strict=True):
        same(results[request_id], expected, exact=True)
    stats = engine.stats()
    assert stats.drafted > 0 and stats.proposer_failures == 0 and num_steps > 2 * every
    assert all(pool.num_free == pool.num_blocks for pool in proposer.kv.pools)
