"""Whole programs on the cpu backend equal the reference in every instruction set.

Weights and KV are float32 here, so only the order of sums differs. test_cpu_linear.py tests other
formats op by op.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.backend import forward
from headrace.backend.cpu import executable as cpu
from headrace.backend.reference import executable as reference
from headrace.backend_traits import KvDtype, traits_of
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.program.fuse import fuse
from headrace.program.op import Value
from headrace.program.ops import Add, Glu, Linear
from headrace.program.trace import Tracer, trace
from tests.backend.batches import Sequence, batch_of
from tests.tiny import tiny_model

ISAS = _native.isas()
BLOCKS = 48
SHAPES = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 3),
        "heads": st.sampled_from([1, 2, 4, 6]),
        "groups": st.sampled_from([1, 2]),
        "head_dim": st.sampled_from([2, 6, 16, 24, 64, 80]),
        "ffn": st.integers(1, 90),
        "vocab": st.integers(2, 70),
        "window": st.sampled_from([0, 0, 1, 7, 40, 300, (7, 0), (0, 40, 1)]),
    }
)


def slack(width: int) -> int:
    """Factor of the tolerance for narrow models, whose norms divide by few numbers near 0."""
    return 10 if width <= 8 else 1


def random_tree(rng: np.random.Generator, nodes: int, vocab: int) -> tuple[list[int], list[int]]:
    return rng.integers(0, vocab, nodes).tolist(), [int(rng.integers(-1, i)) for i in range(nodes)]


def random_steps(rng: np.random.Generator, vocab: int, trees: bool, num_groups: int = 1):
    """Steps of up to four sequences: prompt chunks, then single rows, across blocks and splits."""
    order = rng.permutation(BLOCKS)
    sequences = [
        Sequence([int(b) for b in part], 32) for part in np.array_split(order, rng.integers(1, 5))
    ]
    for _ in range(3):
        num_scheduled, drafts = [], []
        for sequence in sequences:
            budget = len(sequence.blocks) * 32 - sequence.computed
            count = int(rng.choice([1, 1, 5, 33, 140, 300]))
            num_scheduled.append(rng.integers(0, vocab, max(1, min(count, budget // 3))).tolist())
            nodes = int(rng.integers(0, 70)) if trees else 0
            drafts.append(random_tree(rng, min(nodes, budget // 3), vocab))
        yield batch_of(sequences, num_scheduled, drafts, trees, num_groups)
        for sequence, decided in zip(sequences, num_scheduled, strict=True):
            sequence.computed += len(decided)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15, deadline=None)
@given(
    shape=SHAPES, trees=st.booleans(), threads=st.sampled_from([1, 2]), seed=st.integers(0, 2**16)
)
def test_cpu_equals_reference(isa: str, shape: dict, trees: bool, threads: int, seed: int) -> None:
    heads = shape["heads"] * shape["groups"]
    options = {key: shape[key] for key in ("layers", "ffn", "vocab", "window")}
    spec, tensors = tiny_model(
        seed, dim=heads * shape["head_dim"], heads=heads, kv_heads=shape["heads"], **options
    )
    program = trace_model(spec, tensors)
    num_groups = len(program.kv_groups)
    kv = KvConfig((BLOCKS,) * num_groups, 32, "f32")
    truth, fast = (
        reference.compile(program, tensors, kv, 1),
        cpu.CpuExecutable(program, tensors, kv, threads, isa),
    )
    for batch in random_steps(np.random.default_rng(seed), spec.vocab_size, trees, num_groups):
        want, got = forward(truth, batch).logits, forward(fast, batch).logits
        assert np.linalg.norm(got - want) <= 1e-4 * slack(spec.dim) * np.linalg.norm(want)


@pytest.mark.parametrize("isa", ISAS)
def test_ops_that_do_not_fuse(isa: str) -> None:
    """Values with several readers prevent fusion: lone add and glu, and inputs in float32 and
    packed.
    """
    spec, tensors = tiny_model(4, layers=1, dim=64, heads=2, kv_heads=1, ffn=96)

    def attended(g: Tracer) -> Value:
        angles = g.rope_angles((1.0, 0.1), 1.0)
        x = g.embed(g.weight("embed", spec.vocab_size, spec.dim))
        q, k, v = (
            g.linear(x, g.weight(f"layers.0.{n}", rows, spec.dim))
            for n, rows in (("q", 64), ("k", 32), ("v", 32))
        )
        g.kv_write(g.rope(k, angles, spec.head_dim), v, 0)
        return g.add(x, g.attention(g.rope(q, angles, spec.head_dim), 0, 1, spec.head_dim))

    def equations(g: Tracer) -> Value:
        x = g.gather_rows(attended(g))
        gate = g.linear(x, g.weight("layers.0.gate", spec.ffn_dim, spec.dim))
        up = g.linear(x, g.weight("layers.0.up", spec.ffn_dim, spec.dim))
        down = g.weight("layers.0.down", spec.dim, spec.ffn_dim)
        y = g.add(g.linear(g.glu(gate, up), down), g.linear(g.glu(up, gate), down))
        z = g.add(y, x)
        return g.linear(g.add(g.add(z, y), z), g.weight("head", spec.vocab_size, spec.dim))

    program, kv = trace(equations, tensors), KvConfig((BLOCKS,), 32, "f32")
    truth, fast = (
        reference.compile(program, tensors, kv, 1),
        cpu.CpuExecutable(program, tensors, kv, 2, isa),
    )
    kinds = {type(op) for op in fast.program.ops}
    assert {Add, Glu, Linear} <= kinds
    for batch in random_steps(np.random.default_rng(0), spec.vocab_size, trees=True):
        want, got = forward(truth, batch).logits, forward(fast, batch).logits
        assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bf16", 0.02), ("int8", 0.02), ("int4", 0.2), ("k8v4", 0.2)]
)
@settings(max_examples=8, deadline=None)
@given(
    shape=SHAPES, trees=st.booleans(), threads=st.sampled_from([1, 2]), seed=st.integers(0, 2**16)
)
def test_kv_formats(
    isa: str, dtype: KvDtype, tolerance: float, shape: dict, trees: bool, threads: int, seed: int
) -> None:
    """With float32 weights, only rounding of KV differs, by at most one code."""
    heads = shape["heads"] * shape["groups"]
    options = {key: shape[key] for key in ("layers", "ffn", "vocab", "window")}
    spec, tensors = tiny_model(
        seed, dim=heads * shape["head_dim"], heads=heads, kv_heads=shape["heads"], **options
    )
    program = trace_model(spec, tensors)
    num_groups = len(program.kv_groups)
    kv = KvConfig((BLOCKS,) * num_groups, 32, dtype)
    truth, fast = (
        reference.compile(program, tensors, kv, 1),
        cpu.CpuExecutable(program, tensors, kv, threads, isa),
    )
    for batch in random_steps(np.random.default_rng(seed), spec.vocab_size, trees, num_groups):
        want, got = forward(truth, batch).logits, forward(fast, batch).logits
        assert np.linalg.norm(got - want) <= tolerance * slack(spec.dim) * np.linalg.norm(want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", traits_of("cpu").kv_dtypes)
def test_move_slots_of_kv_formats(isa: str, dtype: str) -> None:
    """A context with moved slots gives the same bits, in each KV group."""
    spec, tensors = tiny_model(3, dim=48, heads=6, kv_heads=3, layers=3, window=(0, 40))
    program, kv = trace_model(spec, tensors), KvConfig((8, 8), 32, dtype)
    executable = cpu.CpuExecutable(program, tensors, kv, 1, isa)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, 45).tolist()
    home, away = Sequence([0, 1], 32), Sequence([5, 3], 32)
    forward(executable, batch_of([home], [tokens], [([], [])], False, 2))
    for group in range(2):
        executable.move_slots(group, np.array(home.slots(0, 45)), np.array(away.slots(0, 45)))
    home.computed = away.computed = 45
    here = forward(executable, batch_of([home], [[7]], [([], [])], False, 2)).logits.copy()
    assert np.array_equal(
        here, forward(executable, batch_of([away], [[7]], [([], [])], False, 2)).logits
    )


def test_profile_counts_time_and_barriers() -> None:
    spec, tensors = tiny_model(6, layers=2)
    executable = cpu.CpuExecutable(
        trace_model(spec, tensors), tensors, KvConfig((4,), 32, "f32"), 2, ""
    )
    executable.plan.set_profiling(True)
    forward(executable, batch_of([Sequence([0, 1], 32)], [[1]], [([], [])], False))
    seconds, barriers = executable.plan.profile()
    assert {
        "embed",
        "norm",
        "qkv_rope_write",
        "attention",
        "glu_linear",
        "linear_add",
        "linear",
    } <= {kind for kind, _ in seconds}
    assert all(spent > 0 for _, spent in seconds)
    # One row needs no region for what works row by row: five in a layer (q/k/v, attention, output,
    # gate/up, down), and the head.
    assert barriers == 5 * spec.num_layers + 1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("format", "window"), [("Q4_1", 0), ("Q8_0", (0, 40)), ("BF16", 300)])
def test_rows_of_many_sequences_equal_rows_alone(
    isa: str, threads: int, format: str, window: int | tuple[int, ...]
) -> None:
    """In such steps, linear ops prefetch the KV of the attention op that follows."""
    spec, tensors = tiny_model(
        7, layers=3, dim=64, ffn=96, context=640, format=format, window=window
    )
    program = trace_model(spec, tensors)
    groups = len(program.kv_groups)
    rng = np.random.default_rng(3)
    depths = [0, 1, 31, 32, 33, 255, 256, 300, 600, *rng.integers(0, 100, 15).tolist()]
    blocks = iter(rng.permutation(sum(depth // 32 + 1 for depth in depths)).tolist())
    sequences = [Sequence([next(blocks) for _ in range(depth // 32 + 1)], 32) for depth in depths]
    kv = KvConfig((sum(len(sequence.blocks) for sequence in sequences),) * groups)
    executable = cpu.CpuExecutable(program, tensors, kv, threads, isa)

    for sequence, depth in zip(sequences, depths, strict=True):
        if depth:
            tokens = [rng.integers(0, spec.vocab_size, depth).tolist()]
            executable.launch(batch_of([sequence], tokens, [([], [])], False, groups))
        sequence.computed = depth

    tokens = [[int(token)] for token in rng.integers(0, spec.vocab_size, len(depths))]
    together = forward(
        executable, batch_of(sequences, tokens, [([], [])] * len(depths), False, groups)
    ).logits
    for i, sequence in enumerate(sequences):
        alone = forward(executable, batch_of([sequence], [tokens[i]], [([], [])], False, groups))
        np.testing.assert_array_equal(alone.logits[0], together[i], f"depth {depths[i]}")


def test_fused_program_equals_the_traced_one() -> None:
    spec, tensors = tiny_model(5, layers=3)
    program, kv = trace_model(spec, tensors), KvConfig((BLOCKS,), 32, "f32")
    plain, fused = (reference.compile(p, tensors, kv, 1) for p in (program, fuse(program)))
    assert len(fuse(program).ops) == 3 + 7 * spec.num_layers + 3
    for batch in random_steps(np.random.default_rng(0), spec.vocab_size, trees=True):
        assert np.allclose(
            forward(plain, batch).logits, forward(fused, batch).logits, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("isa", _native.isas())
def test_glu_with_gates_of_any_size(isa: str) -> None:
    gates = np.array(
        [[-1e6, -1000, -200, -88, -1, -0.0, 0, 1, 88, 200, 1000, 1e30, np.nan, 3, -3, 0.5]],
        np.float32,
    )
    plan = _native.Plan(isa, 1)
    x, ones, out = (plan.add_buffer(16, "step", False) for _ in range(3))
    for buffer, values in ((x, gates), (ones, np.ones_like(gates))):
        plan.embed(buffer, plan.add_weight("F32", 1, 16, values.view(np.uint8).reshape(-1), None))
    plan.glu(out, x, ones, "silu")
    row = [np.array(ints, np.int32) for ints in ([0], [0], [0, 1], [0], [1])]
    plan.run(*row, (), None, np.zeros(1, np.int32))
    with np.errstate(over="ignore"):
        expected = gates.astype(np.float64) / (1 + np.exp(-gates.astype(np.float64)))
    np.testing.assert_allclose(plan.floats(out, 1), expected, rtol=1e-5, atol=1e-28)


def test_a_view_of_logits_outlives_its_buffer() -> None:
    plan = _native.Plan("", 1)
    out = plan.add_buffer(1024, "step", False)
    table = np.arange(2 * 1024, dtype=np.float32)
    plan.embed(out, plan.add_weight("F32", 2, 1024, table.view(np.uint8), None))

    def run(plan: _native.Plan, num_rows: int) -> bool:
        tokens, positions = np.ones(num_rows, np.int32), np.arange(num_rows, dtype=np.int32)
        row_start, context, scheduled = (
            np.array(ints, np.int32) for ints in ([0, num_rows], [0], [num_rows])
        )
        moved: bool = plan.run(
            tokens, positions, row_start, context, scheduled, (), None, np.zeros(0, np.int32)
        )
        return moved

    assert run(plan, 1)
    before = plan.floats(out, 1)
    assert run(plan, 5000) and not run(plan, 5000)
    assert before.tolist() == [table[1024:].tolist()]
    for buffer, rows in ((out + 1, 1), (-1, 1), (out, -1), (out, 5001)):
        with pytest.raises(ValueError, match=r"has no such buffer|has not so many rows"):
            plan.floats(buffer, rows)
    del plan
    assert before.tolist() == [table[1024:].tolist()]
