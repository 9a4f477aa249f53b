"""Programs that are fused in part or not at all.

Fusing changes only speed: on the cpu backend, fused and unfused programs give the same bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native
from headrace.backend import Executable, forward
from headrace.backend.cpu import executable as cpu
from headrace.backend.reference import executable as reference
from headrace.backend_traits import KvDtype, traits_of
from headrace.batch import RaggedBatch
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.program import ops
from headrace.program.op import Value
from headrace.program.trace import Tracer, trace
from headrace.quant.formats import StoredTensor
from tests.backend.batches import Sequence, batch_of
from tests.backend.stored import random_stored
from tests.backend.test_cpu_program import BLOCKS, random_steps
from tests.tiny import Tensors, tiny_model

ISAS = _native.isas()
TOLERANCE: dict[KvDtype, float] = {
    "f32": 1e-4,
    "f16": 0.003,
    "bf16": 0.02,
    "int8": 0.02,
    "int4": 0.2,
    "k8v4": 0.2,
}
SHAPES = st.fixed_dictionaries(
    {
        "kv_heads": st.sampled_from([1, 2, 3]),
        "groups": st.sampled_from([1, 2, 3]),
        "head_dim": st.sampled_from([2, 6, 16, 24, 32, 64, 80]),
        "window": st.sampled_from([0, 7]),
    }
)


def model_of(
    shape: dict[str, int], seed: int, rope_share: float = 1.0, **options: str
) -> tuple[ModelSpec, Tensors]:
    """A model that rotates this share of each head, at least two numbers."""
    heads, head_dim = shape["kv_heads"] * shape["groups"], shape["head_dim"]
    sizes = {
        "heads": heads,
        "kv_heads": shape["kv_heads"],
        "head_dim": head_dim,
        "ffn": 96,
        "window": shape["window"],
    }
    # A norm of two columns makes much of little where both are small: queries in bf16, as
    # AVX512-BF16 has them, were 6 % of the logits.
    spec, tensors = tiny_model(seed, dim=max(8, heads * head_dim), **sizes, **options)
    return replace(spec, rope=RopeSpec(max(2, int(head_dim * rope_share) // 2 * 2))), tensors


def op_by_op(
    program_of: tuple[ModelSpec, Tensors], kv: KvConfig, threads: int, isa: str
) -> cpu.CpuExecutable:
    spec, tensors = program_of
    executable = cpu.CpuExecutable(
        trace_model(spec, tensors), tensors, kv, threads, isa, lower=cpu.lower_unfused
    )
    assert {ops.Rope, ops.KvWrite, ops.Glu, ops.Add} <= {type(op) for op in executable.program.ops}
    return executable


def chunks(tokens: list[int], sizes: list[int]) -> Iterator[RaggedBatch]:
    """A prompt in steps of these sizes and a last step, in shuffled blocks."""
    sequence = Sequence([5, 0, 3, 1], 32)
    for size in (*sizes, len(tokens)):
        part = tokens[sequence.computed : sequence.computed + size]
        yield batch_of([sequence], [part], [([], [])], False)
        sequence.computed += len(part)


def logits_of(
    executable: Executable, tokens: list[int], sizes: list[int]
) -> NDArray[np.float32]:  # [tokens, vocab]
    return np.concatenate(
        [forward(executable, batch).logits.copy() for batch in chunks(tokens, sizes)]
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", traits_of("cpu").kv_dtypes)
@settings(max_examples=4, deadline=None)
@given(
    shape=SHAPES,
    share=st.sampled_from([0.5, 1.0]),
    trees=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**16),
)
def test_op_by_op_equals_reference_and_fused(
    isa: str,
    dtype: KvDtype,
    shape: dict[str, int],
    share: float,
    trees: bool,
    threads: int,
    seed: int,
) -> None:
    model, kv = model_of(shape, seed, share), KvConfig((BLOCKS,), 32, dtype)
    spec, tensors = model
    program = trace_model(spec, tensors)
    truth, fused = (
        reference.compile(program, tensors, kv, 1),
        cpu.CpuExecutable(program, tensors, kv, 1, isa),
    )
    plain = op_by_op(model, kv, threads, isa)
    for batch in random_steps(np.random.default_rng(seed), spec.vocab_size, trees):
        want, got = forward(truth, batch).logits, forward(plain, batch).logits
        assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)
        assert np.array_equal(got, forward(fused, batch).logits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["Q4_0", "Q8_0", "BF16", "I8_ROW"])
def test_op_by_op_reads_the_same_activations_as_fused(isa: str, format: str) -> None:
    """Queries, keys and values use int8 activations with offset in both programs."""
    model, kv = (
        model_of({"kv_heads": 2, "groups": 2, "head_dim": 16, "window": 0}, 3, format=format),
        KvConfig((BLOCKS,), 32, "bf16"),
    )
    spec, tensors = model
    fused, plain = (
        cpu.CpuExecutable(trace_model(spec, tensors), tensors, kv, 2, isa),
        op_by_op(model, kv, 2, isa),
    )
    for batch in random_steps(np.random.default_rng(1), spec.vocab_size, trees=True):
        assert np.array_equal(forward(plain, batch).logits, forward(fused, batch).logits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", traits_of("cpu").kv_dtypes)
@pytest.mark.parametrize("head_dim", [6, 32])
def test_op_by_op_bits_do_not_depend_on_chunks_and_threads(
    isa: str, dtype: KvDtype, head_dim: int
) -> None:
    model, kv = (
        model_of({"kv_heads": 2, "groups": 2, "head_dim": head_dim, "window": 0}, 5),
        KvConfig((8,), 32, dtype),
    )
    tokens = np.random.default_rng(0).integers(0, model[0].vocab_size, 101).tolist()
    whole = logits_of(op_by_op(model, kv, 1, isa), tokens, [])
    for threads, sizes in ((2, []), (1, [1, 2, 31, 7, 1, 40]), (2, [33, 33])):
        assert np.array_equal(logits_of(op_by_op(model, kv, threads, isa), tokens, sizes), whole)


@pytest.mark.parametrize("dtype", traits_of("cpu").kv_dtypes)
def test_stale_kv_in_a_block_is_not_read(dtype: KvDtype) -> None:
    """A word may hold a value of this sequence and a stale one, which must not count."""
    model, kv = (
        model_of({"kv_heads": 2, "groups": 1, "head_dim": 16, "window": 0}, 6),
        KvConfig((8,), 32, dtype),
    )
    spec, tensors = model
    values = tensors["embed"].dequantise()
    values[0] = np.nan
    tensors["embed"] = StoredTensor.from_floats("embed", values)
    used, fresh = (op_by_op((spec, tensors), kv, 2, "") for _ in range(2))
    tokens = [1 + i % (spec.vocab_size - 1) for i in range(39)]
    for sizes in ([], [1, 1, 3, 8]):
        assert np.isnan(logits_of(used, [0] * 128, [])).all()
        assert np.array_equal(logits_of(used, tokens, sizes), logits_of(fresh, tokens, sizes))


def decoder(
    spec: ModelSpec, bases: tuple[float, ...], qk_norm: bool = False
) -> Callable[[Tracer], Value]:
    """A decoder whose layers alternate between rope bases or have none, with norms over rows of q
    and k.
    """

    def attended(g: Tracer, layer: int, x: Value, angles: list[Value]) -> Value:
        name, heads = (
            f"layers.{layer}",
            {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads},
        )
        y = g.norm(x, g.weight(f"{name}.attn_norm", 1, spec.dim), spec.norm_eps)
        part = {
            p: g.linear(y, g.weight(f"{name}.{p}", n * spec.head_dim, spec.dim))
            for p, n in heads.items()
        }
        for p in ("q", "k"):
            if qk_norm:
                part[p] = g.norm(
                    part[p], g.weight(f"{name}.{p}_norm", 1, part[p].width), spec.norm_eps
                )
            if angles:
                part[p] = g.rope(part[p], angles[layer % len(angles)], spec.head_dim)
        g.kv_write(part["k"], part["v"], layer)
        return g.attention(part["q"], layer, spec.num_kv_heads, spec.head_dim)

    def equations(g: Tracer) -> Value:
        x = g.embed(g.weight("embed", spec.vocab_size, spec.dim))
        exponents = np.arange(0, spec.head_dim, 2) / spec.head_dim
        angles = [g.rope_angles(tuple((base**-exponents).tolist()), 1.0) for base in bases]
        for layer in range(spec.num_layers):
            y = g.linear(
                attended(g, layer, x, angles), g.weight(f"layers.{layer}.o", spec.dim, spec.dim)
            )
            x = g.add(x, y)
        many = list(
            accumulate([x] * 8, lambda value, _: g.activate(value, "silu"))
        )  # alive together: buffers of their width run out
        mix = g.weight("layers.0.o", spec.dim, spec.dim)
        x = reduce(lambda total, value: g.add(value, g.linear(total, mix)), reversed(many))
        return g.linear(g.gather_rows(x), g.weight("head", spec.vocab_size, spec.dim))

    return equations


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["bf16", "int4"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2)])
@pytest.mark.parametrize(
    ("bases", "qk_norm", "fused_writes"),
    [
        ((10000.0,), False, 4),
        ((10000.0,), True, 0),
        ((), False, 0),
        ((1e6, 1e2), False, 4),
        ((1e6, 1e2), True, 0),
    ],
    ids=["plain", "qk-norm", "no-rope", "two-bases", "two-bases-qk-norm"],
)
def test_partly_fused_attention(
    isa: str,
    dtype: KvDtype,
    heads: int,
    kv_heads: int,
    bases: tuple[float, ...],
    qk_norm: bool,
    fused_writes: int,
) -> None:
    """Norms of queries and keys, no rope, and layers that alternate between two rope bases (Gemma
    3).

    With one head, rows are as wide as angles, which must not share buffers with them.
    """
    spec, tensors = tiny_model(9, layers=4, dim=24 * heads, heads=heads, kv_heads=kv_heads)
    for layer in range(spec.num_layers):
        for part, width in (("q", 24 * heads), ("k", 24 * kv_heads)):
            name = f"layers.{layer}.{part}_norm"
            tensors[name] = replace(
                random_stored("F32", 1, width, layer, name, 1.0), shape=(width,)
            )
    program, kv = trace(decoder(spec, bases, qk_norm), tensors), KvConfig((BLOCKS,), 32, dtype)
    truth = reference.compile(program, tensors, kv, 1)
    fast, plain = (
        cpu.CpuExecutable(program, tensors, kv, 2, isa, lower=lower)
        for lower in (cpu.lower, cpu.lower_unfused)
    )
    assert sum(isinstance(op, ops.QkvRopeWrite) for op in fast.program.ops) == fused_writes
    assert (
        sum(isinstance(op, ops.KvWrite) for op in fast.program.ops)
        == spec.num_layers - fused_writes
    )
    for batch in random_steps(np.random.default_rng(0), spec.vocab_size, trees=True):
        want, got = forward(truth, batch).logits, forward(fast, batch).logits
        assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)
        assert np.array_equal(got, forward(plain, batch).logits)


def test_rope_needs_its_own_angles() -> None:
    plan = _native.Plan("", 1)
    plan.add_kv_group(1, 1, 16, 16, 0, 1, "f32")
    narrow, wide, q, k = (
        plan.rope_angles([1.0], 1.0, 8),
        *(plan.add_buffer(n, "step", False) for n in (64, 16, 8)),
    )
    with pytest.raises(ValueError, match="another head size"):
        plan.rope(q, q, narrow, 16)
    with pytest.raises(ValueError, match="even head size"):
        plan.rope_angles([1.0], 1.0, 7)
    with pytest.raises(ValueError, match="one width"):
        plan.rope(q, wide, narrow, 8)
    with pytest.raises(ValueError, match="as wide as the heads"):
        plan.kv_write(k, q, (0, 0))
