"""Draft models: right ones are always right, wrong ones cost little, and all free their memory."""

from collections import Counter
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from headrace.batch import DraftTree
from headrace.proposer import ProposerTraits
from headrace.sampling_params import SamplingParams
from headrace.speculation.manager import SpeculationManager, StepDrafts
from headrace.speculation.proposers.draft_model import DraftModelProposer
from headrace.speculation.proposers.trees import prune
from tests.draft_engines import draft_engine
from tests.engine.test_machine_drafts import HalfRight
from tests.engine.test_promise import same
from tests.engine.toy import VOCAB, toy_engine, toy_kv, toy_logits
from tests.sampling.test_rejection import is_drawn_from, softmax
from tests.tiny import run_all, tiny_engine, tiny_model

MODEL = tiny_model(3, layers=3)
OTHER = tiny_model(99, layers=1)
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=40)
PENALISED = SamplingParams(
    seed=6,
    presence_penalty=0.7,
    repetition_penalty=1.2,
    logit_bias={3: 2.0},
    min_tokens=9,
    max_tokens=40,
)
SEVERAL = SamplingParams(n=3, seed=7, max_tokens=30)
PROMPTS = [[7, 8, 9, 7, 8], [3], list(range(40))]
ALL_LAYERS = {"draft_model": {}, "self_draft": {"layers": range(3)}}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("how", ALL_LAYERS)
@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, PENALISED, SEVERAL], ids=["greedy", "sampled", "penalised", "n"]
)
def test_the_model_itself_is_always_right(backend: str, how: str, params: SamplingParams) -> None:
    requests = [(prompt, params) for prompt in PROMPTS]
    plain = run_all(tiny_engine(MODEL, backend, kv_dtype="f32"), requests)
    engine, _ = draft_engine(MODEL, how, backend, **ALL_LAYERS[how])
    for one, other in zip(run_all(engine, requests), plain, strict=True):
        same(one, other, exact=backend == "cpu")
    stats = engine.stats()
    assert stats.drafted == stats.accepted > 3 * stats.steps  # of 4 drafts for each sequence
    assert stats.proposer_failures == 0


@pytest.mark.parametrize("width", [1, 3])
def test_fewer_layers_are_sometimes_right(width: int) -> None:
    engine, _ = draft_engine(MODEL, "self_draft", layers=range(2), width=width)
    run_all(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    stats = engine.stats()
    assert 0 < stats.accepted < stats.drafted


def test_siblings_of_drafts_are_right_more_often() -> None:
    """A tree holds more candidates than a chain, so it is right more often."""
    accepted = []
    for width in (1, 4):
        engine, _ = draft_engine(MODEL, "draft_model", draft=OTHER, width=width, depth=2)
        run_all(engine, [(prompt, SAMPLED) for prompt in PROMPTS])
        accepted.append(engine.stats().accepted)
    assert accepted[0] < accepted[1]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_wrong_model_costs_no_step(params: SamplingParams) -> None:
    """A draft model unrelated to the model never needs more steps than plain decoding."""
    requests = [(prompt, params) for prompt in PROMPTS]
    plain = tiny_engine(MODEL, "cpu", kv_dtype="f32")
    expected = run_all(plain, requests)
    engine, _ = draft_engine(MODEL, "draft_model", draft=OTHER)
    for one, other in zip(run_all(engine, requests), expected, strict=True):
        same(one, other, exact=True)
    stats = engine.stats()
    assert stats.accepted < 0.3 * stats.drafted
    assert stats.steps <= plain.stats().steps


@pytest.mark.parametrize("draft_slots", [64, 0])
def test_a_draft_model_frees_its_blocks(draft_slots: int) -> None:
    engine, proposers = draft_engine(
        MODEL,
        "draft_model",
        slots=160,
        draft_slots=draft_slots,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    proposer = proposers["draft_model"]
    assert isinstance(proposer, DraftModelProposer)
    lowest = proposer.kv.pools[0].num_free
    for prompt, params in [*((p, SEVERAL) for p in PROMPTS), *((p, GREEDY) for p in PROMPTS)]:
        engine.add_request(prompt, params)
    aborted = engine.add_request([1, 2, 3], GREEDY)
    while engine.has_work:
        engine.step()
        lowest = min(lowest, proposer.kv.pools[0].num_free)
        if engine.stats().steps == 40:
            engine.abort(aborted)
    assert lowest < proposer.kv.pools[0].num_blocks
    assert proposer.kv.pools[0].num_free == proposer.kv.pools[0].num_blocks
    stats = engine.stats()
    assert stats.accepted > 0 and stats.proposer_failures == 0


def test_a_draft_model_with_a_shorter_context() -> None:
    engine, _ = draft_engine(MODEL, "draft_model", max_length=20)
    (result,) = run_all(
        engine, [([5], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))]
    )
    stats = engine.stats()
    assert stats.drafted == stats.accepted and 10 < stats.accepted < 20
    assert len(result.outputs[0].token_ids) == 60


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("how", ["self_draft", "medusa"])
def test_typical_acceptance_of_trees(how: str, width: int) -> None:
    """Greedy tokens stay the same; sampled requests accept drafts that exact verification would
    reject.
    """
    requests = [(prompt, GREEDY) for prompt in PROMPTS]
    plain = run_all(tiny_engine(MODEL, "cpu", kv_dtype="f32"), requests)
    accepted = []
    for method in ("exact", "typical"):
        engine, _ = draft_engine(
            MODEL, how, layers=range(2), width=width, depth=2, acceptance_method=method
        )
        for one, other in zip(run_all(engine, requests), plain, strict=True):
            same(one, other, exact=True)
        run_all(engine, [(prompt, SAMPLED) for prompt in PROMPTS])
        stats = engine.stats()
        accepted.append(stats.accepted)
        assert stats.proposer_failures == 0 and stats.blocks_free == stats.blocks_total
    assert accepted[0] < accepted[1]


@pytest.mark.parametrize(
    ("how", "options"), [("draft_model", {}), ("self_draft", {"layers": range(3)})]
)
@pytest.mark.parametrize("method", ["rejection", "typical"])
def test_other_acceptance_methods(how: str, options: dict[str, Any], method: str) -> None:
    """If the model drafts for itself, q equals p and every draft is accepted. Greedy tokens equal
    plain decoding with any method.
    """
    requests = [(prompt, GREEDY) for prompt in PROMPTS]
    plain = run_all(tiny_engine(MODEL, "cpu", kv_dtype="f32"), requests)
    engine, _ = draft_engine(MODEL, how, acceptance_method=method, **options)
    for one, other in zip(run_all(engine, requests), plain, strict=True):
        same(one, other, exact=True)
    if method == "rejection":
        run_all(
            engine,
            [(prompt, params) for prompt in PROMPTS for params in (SAMPLED, PENALISED, SEVERAL)],
        )
    stats = engine.stats()
    assert stats.drafted == stats.accepted > 0 and stats.proposer_failures == 0


class EveryOther(SpeculationManager):
    """Runs a part of each chain, by the number of the step. Like a policy, it does not look at the
    tokens.
    """

    num_steps = 0

    def draft(self, drafting: StepDrafts[Any]) -> None:
        super().draft(drafting)
        self.num_steps += 1
        for item in {item for asked in drafting.calls.values() for item in asked}:
            item.draft = prune(
                item.draft, list(range(min(len(item.draft.tokens), 1 + self.num_steps % 3)))
            )


class Certain:
    """Proposes some tokens without probabilities, as n-gram drafts do."""

    traits = ProposerTraits(2, in_engine_thread=True, time_limit=None)

    def propose(self, seqs: list[Any], budgets: list[int]) -> list[DraftTree]:
        sizes = [nodes * (len(seq.known) == 2) for seq, nodes in zip(seqs, budgets, strict=True)]
        return [DraftTree([2, 5][:nodes], [-1, -1][:nodes]) for nodes in sizes]

    def observe(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    ("speculation", "others"),
    [(SpeculationManager, {}), (EveryOther, {}), (SpeculationManager, {"certain": Certain()})],
    ids=["draft", "cut", "mixed"],
)
def test_rejection_in_the_engine_keeps_the_distribution(
    speculation: type[SpeculationManager], others: dict[str, Any]
) -> None:
    """Compares the second and third token of many short texts, with a draft that is wrong about
    half of them.
    """
    draft = DraftModelProposer(HalfRight(4), toy_kv(400, 4), 40, 3, 1, probabilities=True)
    # Few rows for drafts, so that the longer draft does not always win.
    engine = toy_engine(
        num_blocks=400, proposer=draft, acceptance_method="rejection", max_logit_rows=64
    )
    engine._speculation = engine._loop.speculation = speculation(
        {**others, "test": draft}, engine.config, VOCAB, perf_counter
    )
    results = run_all(engine, [([1], SamplingParams(max_tokens=5)) for _ in range(5000)])
    after = [softmax(toy_logits([1, first])) for first in range(VOCAB)]
    first = softmax(toy_logits([1]))
    second = {(t,): float(sum(first[x] * after[x][t] for x in range(VOCAB))) for t in range(VOCAB)}
    third = np.zeros(VOCAB)
    for x in range(VOCAB):
        for y in range(VOCAB):
            third += first[x] * after[x][y] * softmax(toy_logits([1, x, y]))
    tokens = [result.outputs[0].token_ids for result in results]
    assert is_drawn_from(Counter((t[1],) for t in tokens), second)
    assert is_drawn_from(
        Counter((t[2],) for t in tokens), {(t,): float(p) for t, p in enumerate(third)}
    )
    stats = engine.stats()
    assert 0.2 < stats.drafts["test"].acceptance_rate < 0.9 and stats.proposer_failures == 0
    assert all(books.accepted > 200 for books in stats.drafts.values())
