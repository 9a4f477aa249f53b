"""Equivalent scalings: a scaled model is the same function in every family."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend import forward
from headrace.backend.reference import executable as reference
from headrace.config import KvConfig
from headrace.convert.matrices import quantisable
from headrace.convert.scaling import ScalingGroup, Scalings, scaling_groups
from headrace.convert.sequence_batch import num_blocks, sequence_batch
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from tests.backend.stored import random_stored
from tests.families import VARIANTS, spec_of
from tests.tiny import Tensors, random_tensors, tiny_model

PIECE = [5, 17, 3, 60, 60, 8, 42, 11, 1, 30, 2, 77]


def logits(spec: ModelSpec, tensors: Tensors) -> np.ndarray:
    """Logits of the reference backend, with float32 KV."""
    program, blocks = trace_model(spec, tensors), num_blocks(len(PIECE))
    kv = KvConfig((blocks,) * len(program.kv_groups), dtype="f32")
    batch = sequence_batch(
        [token % spec.vocab_size for token in PIECE],
        0,
        len(PIECE),
        len(PIECE),
        blocks,
        len(program.kv_groups),
    )
    found = forward(reference.compile(program, tensors, kv, 1), batch).logits
    assert found is not None and np.isfinite(found).all()
    return found


def groups_of(spec: ModelSpec, tensors: Tensors) -> list[ScalingGroup]:
    return scaling_groups(trace_model(spec, tensors), quantisable(spec, tensors))


def scaled(
    tensors: Tensors, groups: list[ScalingGroup], seed: int, *, powers: bool
) -> tuple[Tensors, set[str]]:
    """The model with all groups scaled by random factors from 1/16 to 16, and the names
    of the changed tensors.
    """
    rng, scalings = np.random.default_rng(seed), Scalings()
    for group in groups:
        exponents = rng.uniform(-4, 4, group.columns.max() + 1)
        scalings.add(group, np.exp2(np.rint(exponents) if powers else exponents).astype(np.float32))
    changed = scalings.rows.keys() | scalings.columns.keys()
    return scalings.apply_all(
        tensors, [name for i, name in enumerate(sorted(changed)) if i % 2]
    ), changed


@pytest.mark.parametrize("name", VARIANTS)
def test_a_scaled_model_computes_the_same(name: str) -> None:
    """Powers of two give equal bits, as they round no number. A tensor that is scaled
    in one place only would change the logits.
    """
    spec = spec_of(name)
    tensors = random_tensors(spec, 3)
    groups = groups_of(spec, tensors)
    want = logits(spec, tensors)
    for powers, tolerance in ((True, 0.0), (False, 1e-4)):
        other, changed = scaled(tensors, groups, 1, powers=powers)
        assert changed and all(
            not np.array_equal(other[each].dequantise(), tensors[each].dequantise())
            for each in changed
        )
        assert all(other[each] is tensors[each] for each in tensors.keys() - changed)
        np.testing.assert_allclose(
            logits(spec, other), want, rtol=0, atol=tolerance * float(np.abs(want).max())
        )


def kinds(name: str) -> Counter[tuple[str, ...]]:
    """The groups of a variant, by the last parts of the producers' names."""
    spec = spec_of(name)
    return Counter(
        tuple(producer.rpartition(".")[2] for producer in group.producers)
        for group in groups_of(spec, random_tensors(spec, 3))
    )


def test_scaling_groups_of_families() -> None:
    """The norms before attention and MLP, v and up, but no value that a residual or
    another activation than relu reads.
    """
    assert kinds("llama3-gqa") == {("attn_norm",): 3, ("mlp_norm",): 3, ("v",): 3, ("up",): 3}
    assert kinds("gpt2") == {
        ("attn_norm", "attn_norm_bias"): 3,
        ("mlp_norm", "mlp_norm_bias"): 3,
        ("v", "v_bias"): 3,
    }
    assert kinds("olmo2") == {("v",): 3, ("up",): 3}
    assert kinds("falcon-7b") == {("attn_norm", "attn_norm_bias"): 3, ("v",): 3}
    assert kinds("mixtral") == {("attn_norm",): 3, ("mlp_norm",): 3, ("v",): 3}
    assert kinds("qwen2-moe") == {
        ("attn_norm",): 3,
        ("mlp_norm",): 3,
        ("v", "v_bias"): 3,
        ("shared_up",): 3,
    }
    assert kinds("deepseek-v2-lite") == {
        ("attn_norm",): 3,
        ("mlp_norm",): 3,
        ("up",): 1,
        ("shared_up",): 2,
    }


def test_relu_lets_factors_through() -> None:
    spec, tensors = tiny_model(1, gated_mlp=False, activation="relu")
    groups = groups_of(spec, tensors)
    assert sum(group.producers[0].endswith(".up") for group in groups) == spec.num_layers
    other, _ = scaled(tensors, groups, 2, powers=True)
    assert np.array_equal(logits(spec, other), logits(spec, tensors))


def test_experts_and_routers_are_scaled_with_their_norm() -> None:
    spec = spec_of("mixtral")
    group = next(
        group
        for group in groups_of(spec, random_tensors(spec, 3))
        if group.producers == ("layers.0.mlp_norm",)
    )
    assert (
        sorted(name.rpartition(".")[2] for name in group.readers)
        == ["gate"] * 4 + ["router"] + ["up"] * 4
    )


def test_query_heads_share_the_factors_of_their_kv_head() -> None:
    spec, tensors = tiny_model(1, layers=1, dim=24, heads=6, kv_heads=2, vocab=20)
    group = next(group for group in groups_of(spec, tensors) if group.producers == ("layers.0.v",))
    assert group.columns.tolist() == [0, 1, 2, 3] * 3 + [4, 5, 6, 7] * 3


@settings(max_examples=30, deadline=None)
@given(
    format=st.sampled_from(["F32", "BF16", "Q4_0", "Q4_K", "I8_ROW"]),
    order=st.sampled_from(["", "some", "shuffled"]),
    sides=st.sampled_from(["rows", "columns", "both"]),
    seed=st.integers(0, 2**16),
)
def test_scaling_factors_by_row_and_column(format: str, order: str, sides: str, seed: int) -> None:
    """The factors apply to every storage and every selection of rows."""
    rng, tensor = np.random.default_rng(seed), random_stored(format, 12, 256, seed, "w")
    if order:
        tensor = tensor.take("w", rng.permutation(12)[: 7 if order == "some" else 12])
    rows, columns = (np.exp(rng.normal(0, 1, n)).astype(np.float32) for n in (tensor.rows, 256))
    scalings = Scalings()
    if sides != "columns":
        scalings.add(ScalingGroup((), ("w",), np.arange(tensor.rows)), 1 / rows)
    if sides != "rows":
        scalings.add(ScalingGroup(("w",), (), np.arange(256)), columns)
    want = (
        tensor.dequantise()
        * (rows[:, None] if sides != "columns" else 1)
        * (columns if sides != "rows" else 1)
    )
    ours = scalings.apply(tensor)
    np.testing.assert_allclose(ours.dequantise(), want, rtol=1e-6)
    wanted = rng.integers(0, tensor.rows, 5)
    np.testing.assert_allclose(ours.dequantise_rows(wanted), want[wanted], rtol=1e-6)


def test_vectors_are_scaled_number_by_number() -> None:
    scalings = Scalings()
    scalings.add(ScalingGroup((), ("n",), np.arange(3)), np.array([2, 4, 0.5], np.float32))
    result = scalings.apply_all({"n": StoredTensor.from_floats("n", np.ones(3, np.float32))}, ())
    assert result["n"].shape == (3,) and result["n"].dequantise().tolist() == [0.5, 0.25, 2]
