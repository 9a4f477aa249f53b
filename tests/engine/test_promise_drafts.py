"""Promise 1 with draft models: right, half right or wrong, they never change a token or a
log-probability.
"""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.speculation.proposers.draft_model import DraftModelProposer
from headrace.speculation.proposers.eagle import EagleProposer
from tests.draft_engines import draft_engine
from tests.drafters import DRAFTERS
from tests.engine.test_promise import EOS, LOADS, VOCAB, alone, keeps_the_promise, model
from tests.tiny import tiny_model

DRAFTS = {
    "itself": None,
    "another": tiny_model(50, layers=1, dim=16, heads=2, kv_heads=1, vocab=VOCAB),
}


@settings(max_examples=80, deadline=None)
@given(
    how=st.sampled_from(["draft_model", "self_draft", "medusa", "auto"]),
    draft=st.sampled_from([*DRAFTS, *DRAFTERS]),
    draft_tokens=st.sampled_from(["", "shared", "other"]),
    depth=st.integers(1, 6),
    width=st.integers(1, 3),
    draft_slots=st.sampled_from([0, 64, 128]),
    adaptive_speculation=st.booleans(),
    **LOADS,
)
def test_same_request_same_tokens(
    which: int, order: list[int], kv_dtype: str, draft: str, stagger: int, **options: Any
) -> None:
    kind = DRAFTERS.get(draft)
    drafter = kind(model(which)) if kind else None
    engine, proposers = draft_engine(
        model(which),
        draft=DRAFTS.get(draft),
        drafter=drafter,
        kv_dtype=kv_dtype,
        eos_ids=EOS,
        **options,
    )
    keeps_the_promise(engine, order, stagger, alone("cpu", which, kv_dtype), exact=True)
    proposer = proposers.get("draft_model")
    if isinstance(proposer, DraftModelProposer | EagleProposer):
        assert all(pool.num_free == pool.num_blocks for pool in proposer.kv.pools)
