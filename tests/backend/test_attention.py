"""Attention with soft caps, ALiBi, sinks, keys and values of different sizes, and MLA: the cpu
backend equals the reference.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace import _native
from headrace.backend import forward
from headrace.backend.cpu import executable as cpu
from headrace.backend.reference import executable as reference
from headrace.backend_traits import KvDtype, traits_of
from headrace.config import KvConfig
from headrace.program import ops
from headrace.program.op import Value
from headrace.program.trace import Program, Tracer, trace
from headrace.quant.formats import StoredTensor
from tests.backend.batches import Sequence, batch_of
from tests.backend.stored import random_stored
from tests.backend.test_cpu_program import BLOCKS, random_steps
from tests.backend.test_unfused_ops import TOLERANCE
from tests.key_roundings import roundings

ISAS = _native.isas()
DIM, VOCAB = 32, 41
Tensors = dict[str, StoredTensor]


class Kind(NamedTuple):
    kv_heads: int
    share: int
    key_dim: int
    value_dim: int
    latent: bool = False
    scale: float | None = None
    window: int = 0
    softcap: float = 0.0
    sloped: bool = False
    has_sinks: bool = False
    num_sink_tokens: int = 0
    has_key_bias: bool = False

    @property
    def frequencies(self) -> tuple[float, ...]:
        """Of all pairs but the last, which does not rotate."""
        return tuple(0.7**pair for pair in range(self.key_dim // 2 - 1))


SIZES = [
    (2, 2),
    (6, 6),
    (16, 16),
    (24, 24),
    (32, 32),
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (256, 256),
]
APART = [(192, 128), (16, 32), (6, 80), (80, 6), (128, 2)]
LATENT = [(48, 32), (24, 16), (80, 64), (64, 48), (6, 2), (36, 36)]
EXTRAS = {
    "share": st.sampled_from([1, 2, 5]),
    "scale": st.sampled_from([None, 0.05, 1.0]),
    "window": st.sampled_from([0, 0, 1, 7, 40, 300]),
    "softcap": st.sampled_from([0.0, 0.0, 0.7, 20.0]),
    "sloped": st.booleans(),
    "has_sinks": st.booleans(),
    "num_sink_tokens": st.sampled_from([0, 0, 1, 4, 33, 260]),
}
KINDS = st.one_of(
    st.builds(
        lambda heads, sizes, **extras: Kind(heads, key_dim=sizes[0], value_dim=sizes[1], **extras),
        st.sampled_from([1, 2, 3]),
        st.sampled_from(SIZES + APART),
        has_key_bias=st.booleans(),
        **EXTRAS,
    ),
    st.builds(
        lambda sizes, **extras: Kind(
            1, key_dim=sizes[0], value_dim=sizes[1], latent=True, **extras
        ),
        st.sampled_from(LATENT),
        **EXTRAS,
    ),
)

ALL = (
    Kind(2, 2, 16, 16, softcap=5.0, sloped=True, has_sinks=True, has_key_bias=True),
    Kind(1, 5, 48, 32, latent=True, window=40, has_sinks=True),
    Kind(3, 1, 24, 80, window=40, sloped=True, num_sink_tokens=5, has_key_bias=True),
    Kind(1, 3, 64, 48, latent=True, softcap=9.0),
)


def model(*kinds: Kind, seed: int = 0) -> tuple[Program, Tensors]:
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}

    def tensor(name: str, rows: int, cols: int, scale: float) -> None:
        tensors[name] = random_stored("F32", rows, cols, int(rng.integers(2**32)), name, scale)

    tensor("embed", VOCAB, DIM, 1.0)
    tensor("head", VOCAB, DIM, DIM**-0.5)
    for i, kind in enumerate(kinds):
        heads = kind.kv_heads * kind.share
        tensor(f"{i}.q", heads * kind.key_dim, DIM, 2 * DIM**-0.5)
        tensor(f"{i}.k", kind.kv_heads * kind.key_dim, DIM, DIM**-0.5)
        tensor(f"{i}.v", kind.kv_heads * kind.value_dim, DIM, DIM**-0.5)
        tensor(f"{i}.o", DIM, heads * kind.value_dim, (heads * kind.value_dim) ** -0.5)
        tensor(f"{i}.sinks", 1, heads, 2.0)
        tensors[f"{i}.sinks"] = replace(tensors[f"{i}.sinks"], shape=(heads,))
        tensors[f"{i}.key_bias"] = key_bias_of(kind, rng)

    def attended(g: Tracer, x: Value, i: int, kind: Kind) -> Value:
        heads = kind.kv_heads * kind.share
        sizes = {
            "q": heads * kind.key_dim,
            "k": kind.kv_heads * kind.key_dim,
            "v": kind.kv_heads * kind.value_dim,
        }
        q, k = (g.linear(x, g.weight(f"{i}.{name}", sizes[name], DIM)) for name in "qk")
        g.kv_write(k, None if kind.latent else g.linear(x, g.weight(f"{i}.v", sizes["v"], DIM)), i)
        slopes = (
            tuple(2.0 ** -(1 + 8 * head / heads) for head in range(heads)) if kind.sloped else ()
        )
        sinks = g.vector(f"{i}.sinks", heads) if kind.has_sinks else None
        rest: dict[str, Any] = {
            "scale": kind.scale,
            "value_dim": kind.value_dim,
            "softcap": kind.softcap,
        }
        rest |= {"num_sink_tokens": kind.num_sink_tokens if kind.window else 0}
        if kind.has_key_bias:
            rest |= {"key_bias": g.vector(f"{i}.key_bias", sizes["k"])}
            rest |= {"key_frequencies": kind.frequencies, "key_factor": 1.2}
        y = g.attention(
            q,
            i,
            kind.kv_heads,
            kind.key_dim,
            kind.window,
            slopes=slopes,
            sinks=sinks,
            is_latent=kind.latent,
            **rest,
        )
        return g.linear(y, g.weight(f"{i}.o", DIM, heads * kind.value_dim))

    def equations(g: Tracer) -> Value:
        x = g.embed(g.weight("embed", VOCAB, DIM))
        for i, kind in enumerate(kinds):
            x = g.add(x, attended(g, x, i, kind))
        return g.linear(g.gather_rows(x), g.weight("head", VOCAB, DIM))

    return trace(equations, tensors), tensors


def key_bias_of(kind: Kind, rng: np.random.Generator) -> StoredTensor:
    """Biases of the first pair of each head, and of the last."""
    bias = np.zeros((kind.kv_heads, kind.key_dim), np.float32)
    for numbers in (slice(2), slice(kind.key_dim - 2, None)):
        bias[:, numbers] = 3 * rng.standard_normal((kind.kv_heads, 2))
    return StoredTensor.from_floats("key_bias", bias.reshape(-1))


def kv_of(program: Program, dtype: KvDtype, blocks: int = BLOCKS) -> KvConfig:
    rounding = roundings(program) if dtype == "int4" else ()
    return KvConfig((blocks,) * len(program.kv_groups), 32, dtype, rounding)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", traits_of("cpu").kv_dtypes)
@settings(max_examples=3, deadline=None)
@example([ALL[0], ALL[1]], True, 2, 1)
@example([ALL[2], ALL[3]], True, 1, 2)
@example(
    [Kind(1, 2, 48, 32, latent=True), Kind(1, 4, 48, 16, latent=True)], False, 2, 3
)  # one group, of which they read differently much
@given(
    kinds=st.lists(KINDS, min_size=1, max_size=2),
    trees=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**16),
)
def test_attention_equals_reference_and_fused(
    isa: str, dtype: KvDtype, kinds: list[Kind], trees: bool, threads: int, seed: int
) -> None:
    program, tensors = model(*kinds, seed=seed)
    kv, num_groups = kv_of(program, dtype), len(program.kv_groups)
    truth, fused = (
        reference.compile(program, tensors, kv, 1),
        cpu.CpuExecutable(program, tensors, kv, threads, isa),
    )
    plain = cpu.CpuExecutable(program, tensors, kv, 1, isa, lower=cpu.lower_unfused)
    for batch in random_steps(np.random.default_rng(seed), VOCAB, trees, num_groups):
        want, got = forward(truth, batch).logits, forward(fused, batch).logits
        assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)
        assert np.array_equal(got, forward(plain, batch).logits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", traits_of("cpu").kv_dtypes)
def test_attention_bits_do_not_depend_on_chunks_and_threads(isa: str, dtype: KvDtype) -> None:
    program, tensors = model(*ALL)
    assert len(program.kv_groups) == 4
    kv = kv_of(program, dtype, 16)

    def logits(threads: int, sizes: list[int], blocks: list[int]) -> NDArray[np.float32]:
        executable, sequence = (
            cpu.CpuExecutable(program, tensors, kv, threads, isa),
            Sequence(blocks, 32),
        )
        rows = []
        for size in (*sizes, len(tokens) - sum(sizes)):
            part = tokens[sequence.computed : sequence.computed + size]
            rows.append(
                forward(
                    executable, batch_of([sequence], [part], [([], [])], False, 4)
                ).logits.copy()
            )
            sequence.computed += len(part)
        return np.concatenate(rows)

    tokens = np.random.default_rng(0).integers(0, VOCAB, 310).tolist()
    whole = logits(1, [], [*range(16)])
    for threads, sizes in ((2, []), (1, [1, 2, 31, 7, 200, 1, 40]), (2, [300])):
        assert np.array_equal(logits(threads, sizes, [*range(16)][::-1]), whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", traits_of("cpu").kv_dtypes)
def test_mla_attention_of_deepseek(isa: str, dtype: KvDtype) -> None:
    """Keys have 512 latent and 64 rotated numbers; the latent part is the value of 16 heads."""
    program, tensors = model(Kind(1, 16, 576, 512, latent=True))
    kv = kv_of(program, dtype, 12)
    truth, fast = (
        reference.compile(program, tensors, kv, 1),
        cpu.CpuExecutable(program, tensors, kv, 2, isa),
    )
    assert fast.plan.kv_bytes == [12 * program.kv_groups[0].block_bytes(dtype, 32)]
    sequence, rng = Sequence([3, 0, 5, 1, *range(6, 12)], 32), np.random.default_rng(0)
    for count in (70, 1, 190, 1, 1):
        batch = batch_of([sequence], [rng.integers(0, VOCAB, count).tolist()], [([], [])], False)
        want, got = forward(truth, batch).logits, forward(fast, batch).logits
        assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)
        sequence.computed += count


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", traits_of("cpu").kv_dtypes)
def test_moved_slots_keep_attention(isa: str, dtype: KvDtype) -> None:
    program, tensors = model(*ALL)
    executable = cpu.CpuExecutable(program, tensors, kv_of(program, dtype, 8), 1, isa)
    tokens = np.random.default_rng(0).integers(0, VOCAB, 45).tolist()
    home, away = Sequence([0, 1], 32), Sequence([5, 3], 32)
    forward(executable, batch_of([home], [tokens], [([], [])], False, 4))
    for group in range(4):
        executable.move_slots(group, np.array(home.slots(0, 45)), np.array(away.slots(0, 45)))
    home.computed = away.computed = 45
    here = forward(executable, batch_of([home], [[7]], [([], [])], False, 4)).logits.copy()
    assert np.array_equal(
        here, forward(executable, batch_of([away], [[7]], [([], [])], False, 4)).logits
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", traits_of("cpu").kv_dtypes)
@pytest.mark.parametrize("kind", ALL)
def test_not_finite_token_spoils_only_rows_that_see_it(
    isa: str, dtype: KvDtype, kind: Kind
) -> None:
    """With MLA too. Rows of the same chunk, and later rows of its block, are not affected."""
    for bad in (np.float32(np.nan), np.float32(-np.inf), np.float32(3e38)):
        program, tensors = model(kind._replace(window=0))
        embed = tensors["embed"].dequantise()
        embed[7] = bad
        tensors["embed"] = StoredTensor.from_floats("embed", embed)
        executable = cpu.CpuExecutable(program, tensors, kv_of(program, dtype, 8), 2, isa)

        def logits(
            *prompts: list[int], draft: list[int] | None = None, run: cpu.CpuExecutable = executable
        ) -> NDArray[np.float32]:
            sequences = [Sequence([3 * i + 1, 3 * i, 3 * i + 2], 32) for i in range(len(prompts))]
            trees = [(draft or [], [-1] * len(draft or []))] * len(prompts)
            return forward(
                run, batch_of(sequences, list(prompts), trees, draft is not None)
            ).logits.copy()

        prompt, good = [1 + i % 6 for i in range(45)], [8 + i % 30 for i in range(45)]
        alone, other = logits(prompt), logits(good)
        for at in (0, 33, 44):
            both = logits([*prompt[:at], 7, *prompt[at + 1 :]], good)
            assert np.array_equal(both[:at], alone[:at]) and np.array_equal(both[45:], other)
            assert not np.isfinite(both[at:45]).any()
        tree = logits(prompt, draft=[9, 7, 10])
        assert np.array_equal(
            tree[[*range(46), 47]], logits(prompt, draft=[9, 11, 10])[[*range(46), 47]]
        )
        assert not np.isfinite(tree[46]).any()
        assert np.array_equal(logits(good), other)


@pytest.mark.parametrize("isa", ISAS)
def test_alibi_slopes_at_a_long_distance(isa: str) -> None:
    """ALiBi is exact at any position: 100,000 unseen tokens before a context change no bit.

    The blocks of the unseen tokens are one block of zeros.
    """
    kind = Kind(1, 2, 16, 16, sloped=True)
    program, tensors = model(kind)
    kv = KvConfig((40,), 32, "f32")
    truth, fast = (
        reference.compile(program, tensors, kv, 1),
        cpu.CpuExecutable(program, tensors, kv, 2, isa),
    )
    table = np.zeros((1, 131072 // 32), np.int32)
    table[0, -30:] = np.arange(1, 31)
    context = 131072 - 40
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40).astype(np.int32)
    sequence = Sequence(table[0].tolist(), 32)
    sequence.computed = context
    batch = batch_of([sequence], [tokens.tolist()], [([], [])], False)
    batch = batch._replace(logit_rows=np.array([0, 19, 39], np.int32))
    want, got = forward(truth, batch).logits, forward(fast, batch).logits
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def plan_with(key_dim: int, value_dim: int, packed: bool = False) -> _native.Plan:
    """A plan for 2 query heads of one KV head. Buffers: 0 queries, 1 result, 2 another with 3
    columns.
    """
    plan = _native.Plan("", 1)
    plan.add_kv_group(1, 1, key_dim, value_dim, 0, 2, "bf16")
    plan.add_buffer(2 * key_dim, "step", False)
    plan.add_buffer(2 * (value_dim or 8), "step", packed)
    plan.add_buffer(3, "step", False)
    for size in (2, 3):
        plan.add_vector(np.ones(size, np.float32))
    return plan


def with_key_bias(plan: _native.Plan, *pairs: tuple[int, int, float, float, float]) -> None:
    plan.attention(1, 0, (0, 0), 2, 8, 1.0, 0.0, [], -1, list(pairs))


Call = Callable[[_native.Plan], Any]


@pytest.mark.parametrize(("sizes", "call", "message"), [
    ((16, 8), lambda p: p.attention(1, 0, (0, 0), 2, 16, 1.0), "values are those of the cache"),
    ((16, 0), lambda p: p.attention(1, 0, (0, 0), 2, 18, 1.0), "values are those of the cache"),
    ((16, 0), lambda p: p.attention(1, 0, (0, 0), 2, 7, 1.0), "values are those of the cache"),
    ((16, 0), lambda p: p.attention(1, 0, (0, 0), 2, 0, 1.0), "values are those of the cache"),
    ((16, 0), lambda p: p.attention(1, 0, (0, 0), 2, 6, 1.0), "a value for each head"),
    ((16, 8), lambda p: p.attention(1, 2, (0, 0), 2, 8, 1.0), "queries are as wide"),
    ((16, 8), lambda p: p.attention(1, 0, (0, 0), 2, 8, 0.0), "a scale above 0"),
    ((16, 8), lambda p: p.attention(1, 0, (0, 0), 2, 8, -1.0), "a scale above 0"),
    ((16, 8), lambda p: p.attention(1, 0, (0, 0), 2, 8, float("nan")), "a scale above 0"),
    ((16, 8), lambda p: p.attention(1, 0, (0, 0), 2, 8, 1.0, -1.0), "a cap"),
    ((16, 8), lambda p: p.attention(1, 0, (0, 0), 2, 8, 1.0, 0.0, [1.0]), "a slope"),
    ((16, 8), lambda p: p.attention(1, 0, (0, 0), 2, 8, 1.0, 0.0, [], 1), "a vector is not there"),
    ((16, 8), lambda p: with_key_bias(p, (1, 0, 1.0, 1.0, 1.0)), "two numbers of its keys"),
    ((16, 8), lambda p: with_key_bias(p, (-1, 0, 1.0, 1.0, 1.0)), "two numbers of its keys"),
    ((16, 8), lambda p: with_key_bias(p, (0, 15, 1.0, 1.0, 1.0)), "two numbers of its keys"),
    ((16, 8), lambda p: with_key_bias(p, (0, -1, 1.0, 1.0, 1.0)), "two numbers of its keys"),
    ((16, 8), lambda p: with_key_bias(p, (0, 0, float("inf"), 1.0, 1.0)), "a finite frequency"),
    ((16, 8), lambda p: with_key_bias(p, (0, 0, 1.0, float("nan"), 1.0)), "a finite frequency"),
    ((16, 8), lambda p: with_key_bias(p, *[(0, 0, 1.0, 1.0, 1.0)] * 65), "at most 64 pairs"),
    ((16, 8), lambda p: p.kv_write(0, -1, (0, 0)), "values to write"),
    ((16, 0), lambda p: p.kv_write(0, 0, (0, 0)), "values to write"),
    ((16, 0), lambda p: p.kv_write(2, -1, (0, 0)), "keys are as wide"),
    ((32, 16), lambda p: p.kv_write(1, 0, (0, 0)), "values are as wide"),
    ((16, 8), lambda p: p.qkv_rope_write(0, 1, 2, (0, 0, 0), (-1, -1, -1), (0, 0)), "as long as values"),  # noqa: E501
    ((16, 7), lambda p: None, "even head sizes"),
    ((15, 8), lambda p: None, "even head sizes"),
    ((16, -2), lambda p: None, "2.24 numbers"),
])  # fmt: skip
def test_invalid_attention_sizes_are_refused(
    sizes: tuple[int, int], call: Call, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(plan_with(*sizes))


def test_heads_of_partial_groups_are_not_packed() -> None:
    with pytest.raises(ValueError, match="whole groups"):
        plan_with(16, 8, packed=True).attention(1, 0, (0, 0), 2, 8, 1.0)
    plan_with(16, 32, packed=True).attention(1, 0, (0, 0), 2, 32, 1.0)


def test_keys_and_values_of_different_sizes_do_not_fuse() -> None:
    tensors = {
        name: random_stored("F32", rows, 16, i, name)
        for i, (name, rows) in enumerate((("q", 32), ("k", 32), ("v", 8), ("w", 32)))
    }
    for value, fuses in (("v", False), ("w", True)):

        def layer(g: Tracer, value: str = value) -> Value:
            x, angles = g.input(16), g.rope_angles((1.0,), 1.0)
            q, k = (g.rope(g.linear(x, g.weight(name, 32, 16)), angles, 32) for name in "qk")
            v = g.linear(x, g.weight(value, tensors[value].rows, 16))
            g.kv_write(k, v, 0)
            return g.attention(q, 0, 1, 32, value_dim=v.width)

        lowered = cpu.lower(trace(layer, tensors), tensors)
        assert any(isinstance(op, ops.QkvRopeWrite) for op in lowered.ops) == fuses
