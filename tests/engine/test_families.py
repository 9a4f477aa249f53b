"""Promise 1 for every family and variant: the same tokens alone and in a batch, in chunks, with
drafts, with int8 KV.
"""

from typing import Any

import pytest

from headrace.model.spec import ModelSpec
from tests.engine.test_promise import REQUESTS, same, truth
from tests.families import VARIANTS, VOCAB, spec_of
from tests.random_trees import RandomTrees
from tests.tiny import Tensors, random_tensors, run_all, tiny_engine

FEW = [0, 1, 3, 5]
"""Greedy and sampled requests, one of four sequences, with log-probabilities."""


def keeps_the_promise(model: tuple[ModelSpec, Tensors], kv_dtype: Any, **options: Any) -> None:
    by_themselves = tiny_engine(
        model, "cpu", kv_dtype=kv_dtype, prefix_cache=False, release_outside_window=False
    )
    alone = {which: run_all(by_themselves, [REQUESTS[which]])[0] for which in FEW}
    if options.pop("drafts", False):
        options["proposer"] = RandomTrees(
            0, VOCAB, truth([alone.get(i, alone[0]) for i in range(len(REQUESTS))], FEW), 9
        )
    engine = tiny_engine(model, "cpu", kv_dtype=kv_dtype, slots=800, **options)
    for result, which in zip(run_all(engine, [REQUESTS[which] for which in FEW]), FEW, strict=True):
        same(result, alone[which], exact=True)
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total and (stats.accepted > 0) == (
        "proposer" in options
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_all_families_give_the_same_tokens_in_any_batch(name: str) -> None:
    spec = spec_of(name)
    model = spec, random_tensors(spec, 1)
    keeps_the_promise(model, "bf16", max_num_batched_tokens=5, threads=2)
    keeps_the_promise(model, "f32", drafts=True)
    keeps_the_promise(model, "int8", drafts=True, max_num_batched_tokens=17)
