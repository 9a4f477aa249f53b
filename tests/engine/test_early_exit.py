"""Early exit: a model of its own, whose tokens depend on their sequence alone."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend import compile_program, forward
from headrace.config import KvConfig
from headrace.loader.exit_map import ExitMap
from headrace.model import trace_model
from headrace.model.spec import EarlyExit, ModelSpec
from headrace.outputs import RequestOutput
from headrace.program.ops import ExitChoice
from headrace.quant.formats import StoredTensor
from tests.backend.test_cpu_program import BLOCKS, random_steps
from tests.draft_engines import draft_engine
from tests.engine.test_promise import EOS, LOADS, MODELS, REQUESTS, keeps_the_promise, model
from tests.tiny import Tensors, run_all, tiny_engine, tiny_model

KV = KvConfig((BLOCKS,), 32, "f32")
MARGIN = 0.05
"""Of the tiny models, about half of the rows are clearer after the first layer."""


def exit_model(which: int) -> tuple[ModelSpec, Tensors]:
    """A tiny model with an exit; every second has a map before the head."""
    spec, tensors = model(which)
    exits = EarlyExit(1, MARGIN)
    if which % 2:
        rng = np.random.default_rng(which)
        weight = np.eye(spec.dim) + 0.1 * rng.standard_normal((spec.dim, spec.dim))
        exit_map = ExitMap.of(weight.astype(np.float32), np.ones(spec.dim, np.float32))
        tensors = {**tensors, **exit_map.tensors(exits.map_name)}
    return replace(spec, early_exit=exits), tensors


@cache
def alone(which: int, kv_dtype: str) -> list[RequestOutput]:
    engine = tiny_engine(
        exit_model(which), "cpu", eos_ids=EOS, kv_dtype=kv_dtype, prefix_cache=False
    )
    return [run_all(engine, [request])[0] for request in REQUESTS]


@settings(max_examples=30, deadline=None)
@given(
    how=st.sampled_from(["self_draft", "draft_model", "medusa", "auto"]),
    depth=st.integers(1, 6),
    width=st.integers(1, 2),
    adaptive_speculation=st.booleans(),
    **LOADS,
)
def test_same_request_same_tokens(
    which: int, order: list[int], kv_dtype: str, stagger: int, **options: Any
) -> None:
    """In any batch, with any chunks, preemptions, threads and proposers."""
    engine, _ = draft_engine(exit_model(which), kv_dtype=kv_dtype, eos_ids=EOS, **options)
    keeps_the_promise(engine, order, stagger, alone(which, kv_dtype), exact=True)


@pytest.mark.parametrize("isa_rows", [(False, 0), (True, 1)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_are_of_the_first_layers_or_of_all(backend: str, isa_rows: tuple[bool, int]) -> None:
    """Each row has the bits of one of both models; the first layers alone have no other rows."""
    trees, seed = isa_rows
    spec, tensors = tiny_model(seed, layers=3, format="Q8_0")
    exits = replace(spec, early_exit=EarlyExit(2, MARGIN))
    full, early, both, short = (
        compile_program(backend, trace_model(each, tensors), tensors, KV, 1)
        for each in (spec, spec.with_layers((0, 1)), exits, exits.with_layers((0, 1)))
    )
    left = []
    for batch in random_steps(np.random.default_rng(seed), spec.vocab_size, trees):
        late, first, chosen, drafted = (
            forward(executable, batch).logits.copy() for executable in (full, early, both, short)
        )
        weights = np.exp(first - first.max(axis=1, keepdims=True), dtype=np.float64)
        best = np.sort(weights / weights.sum(axis=1, keepdims=True), axis=1)[:, -2:]
        margin = best[:, 1] - best[:, 0]
        leaves = margin >= MARGIN
        clear = np.abs(margin - MARGIN) > 1e-6
        expected = np.where(leaves[:, None], first, late)
        np.testing.assert_array_equal(chosen[clear], expected[clear])
        np.testing.assert_array_equal(drafted[leaves & clear], first[leaves & clear])
        assert np.isnan(drafted[~leaves & clear]).all()
        left += leaves.tolist()
    assert 0 < sum(left) < len(left)


@pytest.mark.parametrize("scale", [np.nan, np.inf, 0.0, 1e4])
def test_margins_of_unusual_rows(scale: float) -> None:
    """Rows that are not finite go on to all layers; equal logits have a margin of 0."""
    spec, tensors = tiny_model(4, layers=2)
    norm = StoredTensor.from_floats("norm", np.full(spec.dim, scale, np.float32))
    changed = tensors | {"norm": norm}
    batch = next(iter(random_steps(np.random.default_rng(1), spec.vocab_size, trees=False)))
    for margin in (0.0, 1e-9, 1.1):
        exits = replace(spec.with_layers((0,)), early_exit=EarlyExit(1, margin))
        leaves = []
        for backend in ("cpu", "reference"):
            executable = compile_program(backend, trace_model(exits, changed), changed, KV, 1)
            with np.errstate(all="ignore"):
                leaves.append(np.isfinite(forward(executable, batch).logits).all(axis=1))
        assert np.array_equal(*leaves)
        if scale == 0 or not np.isfinite(scale) or margin > 1:
            assert leaves[0].all() == (scale == 0 and margin == 0)


@pytest.mark.parametrize("which", range(len(MODELS)))
def test_every_draft_of_the_first_layers_is_right(which: int) -> None:
    """Clear tokens are drafted, and the others end a chain."""
    engine, _ = draft_engine(exit_model(which), "self_draft", depth=6, eos_ids=EOS)
    run_all(engine, list(REQUESTS))
    stats = engine.stats()
    assert stats.accepted == stats.drafted


def test_the_op_states_its_costs_and_keeps_the_head() -> None:
    spec, tensors = tiny_model(2, layers=3)
    program = trace_model(replace(spec, early_exit=EarlyExit(2, 0.5)), tensors).with_pooled()
    (choice,) = (op for op in program.ops if isinstance(op, ExitChoice))
    assert program.logits == choice.out and program.head().out == choice.late
    assert program.with_hidden().hidden == program.head().x
    plain = trace_model(spec, tensors)
    assert program.weights.keys() == plain.weights.keys() and program.kv_groups == plain.kv_groups
