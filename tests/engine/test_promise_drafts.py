"""Promise 1 with models that guess: right, half right or wrong, they never change a token or a log-probability."""

from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import KvDtype
from headrace.propose.draft_model import DraftModel
from tests.drafting import draft_engine
from tests.engine.test_promise import EOS, REQUESTS, VOCAB, alone, model, same
from tests.tiny import drain, tiny_model

DRAFTS = {"itself": None, "another": tiny_model(50, layers=1, dim=16, heads=2, kv_heads=1, vocab=VOCAB)}


@settings(max_examples=80, deadline=None)
@given(
    which=st.integers(0, 2),
    order=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=10),
    kv_dtype=st.sampled_from(get_args(KvDtype)),
    how=st.sampled_from(["draft_model", "self_draft", "medusa", "auto"]),
    draft=st.sampled_from(list(DRAFTS)),
    depth=st.integers(1, 6),
    width=st.integers(1, 3),
    draft_slots=st.sampled_from([0, 64, 128]),
    max_step_rows=st.sampled_from([1, 3, 8, 17, 64]),
    max_num_seqs=st.sampled_from([1, 2, 5, 32]),
    max_logit_rows=st.sampled_from([4, 64]),
    slots=st.sampled_from([42, 80, 800]),
    stagger=st.integers(0, 3),
    prefix_cache=st.booleans(),
    guess_control=st.booleans(),
    threads=st.integers(1, 2),
)
def test_same_request_same_tokens(which: int, order: list[int], kv_dtype: str, draft: str, stagger: int, **options: Any) -> None:
    expected = alone("cpu", which, kv_dtype)
    engine, proposers = draft_engine(model(which), draft=DRAFTS[draft], kv_dtype=kv_dtype, eos_ids=EOS, **options)
    updates, ids = [], []
    for request in order:
        ids.append(engine.add_request(*REQUESTS[request]))
        for _ in range(stagger):
            updates += engine.step()
    updates += drain(engine)
    results = {update.request_id: update.result for update in updates if update.result}
    for request_id, request in zip(ids, order, strict=True):
        same(results[request_id], expected[request], exact=True)
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total
    assert stats.proposer_failures == 0
    proposer = proposers.get("draft_model")
    if isinstance(proposer, DraftModel):
        assert proposer.pool.num_free == proposer.pool.num_blocks
