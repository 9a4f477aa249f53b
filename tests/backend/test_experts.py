"""Mixtures of experts on the cpu backend equal the reference: routing and experts."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.backend import Executable, forward
from headrace.backend.cpu import executable as cpu
from headrace.backend.reference import executable as reference
from headrace.config import KvConfig
from headrace.errors import UnsupportedModelError
from headrace.model import trace_model
from headrace.model.spec import ExpertSpec, ModelSpec
from headrace.program.ops import Activation
from headrace.program.trace import Program
from headrace.quant import formats
from headrace.sampling_params import SamplingParams
from tests.backend.stored import random_stored
from tests.backend.test_cpu_linear import run_rows
from tests.backend.test_cpu_program import BLOCKS, random_steps
from tests.moe import MoeModel, Rows, rows_batch
from tests.tiny import Tensors, run_all, tiny_engine, tiny_model

ISAS = _native.isas()
FORMATS = ("F32", "BF16", "F16", "Q4_0", "Q8_0", "Q4_K", "I8_ROW", "I8_MIXED", "IQ2_XS", "IQ3_XXS")
TOLERANCE = {"F32": 1e-5, "F16": 1e-5, "BF16": 0.01}
"""Tolerance relative to the norm of the result. Other formats have int8 activations: 0.03 for many
rows, and 0.1 for a few, since the worst of 57,000 random outputs of one or two rows had 0.066.
"""
NO_KV = KvConfig(())


def on_cpu(made: tuple[Program, Tensors], isa: str = "", threads: int = 1) -> cpu.CpuExecutable:
    return cpu.CpuExecutable(*made, NO_KV, threads, isa)


def outputs(executable: Executable, x: Rows) -> Rows:
    return forward(executable, rows_batch(x)).logits.copy()


def random_rows(num_rows: int, dim: int, seed: int, step: float = 0.0) -> Rows:
    """Normal numbers, rounded to multiples of `step` (so that many are equal) if it is given."""
    x = np.random.default_rng(seed).standard_normal((num_rows, dim)).astype(np.float32)
    return (np.round(x / step) * step).astype(np.float32) if step else x


SIZES = [
    (8, 2, (1, 1)),
    (5, 5, (1, 1)),
    (16, 3, (4, 2)),
    (12, 6, (3, 2)),
    (4, 1, (4, 3)),
    (64, 8, (8, 4)),
    (1, 1, (1, 1)),
]
"""(experts, top_k, groups, top_groups)"""
ROUTINGS = st.fixed_dictionaries(
    {
        "scoring": st.sampled_from(["softmax", "sigmoid"]),
        "normalised": st.booleans(),
        "factor": st.sampled_from([1.0, 2.5]),
        "sizes": st.sampled_from(SIZES),
        "has_route_bias": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    options=ROUTINGS,
    step=st.sampled_from([0.0, 0.5, 40.0]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**16),
)
def test_route_equals_reference(options: dict, step: float, threads: int, seed: int) -> None:
    """Including equal logits, and logits so large that scores are equal."""
    experts, top_k, groups = options.pop("sizes")
    made = MoeModel(experts, top_k, groups=groups, **options).routing()
    x = random_rows(9, experts, seed, step)
    want, got = (
        outputs(reference.compile(*made, NO_KV, 1), x),
        outputs(on_cpu(made, threads=threads), x),
    )
    assert np.array_equal(got[:, :top_k], want[:, :top_k])
    assert np.allclose(got[:, top_k:], want[:, top_k:], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_route_breaks_ties_by_lower_number(scoring: str) -> None:
    x = np.zeros((2, 8), np.float32)
    x[1, [3, 6, 7]] = 1
    for made in (
        MoeModel(scoring=scoring, top_k=4).routing(),
        MoeModel(scoring=scoring, top_k=4, groups=(4, 2)).routing(),
    ):
        for executable in (reference.compile(*made, NO_KV, 1), on_cpu(made)):
            got = outputs(executable, x)
            assert got[0].tolist() == [0, 1, 2, 3, 0.25, 0.25, 0.25, 0.25]
            assert got[1, :3].tolist() == [3, 6, 7]


def shaped(shape: tuple[int, int, int, int], format: str, **options: object) -> MoeModel:
    experts, top_k, dim, hidden = shape
    block = max(32, formats.FORMATS[format].block)
    return MoeModel(
        experts, top_k, -(-dim // block) * block, -(-hidden // block) * block, format, **options
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=6, deadline=None)
@given(
    shape=st.sampled_from(
        [(8, 2, 64, 96), (3, 3, 32, 32), (16, 4, 96, 160), (1, 1, 32, 64), (5, 1, 64, 32)]
    ),
    num_rows=st.sampled_from([1, 2, 7, 40, 150]),
    biases=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 2**16),
)
def test_experts_equal_reference(
    isa: str,
    format: str,
    shape: tuple[int, int, int, int],
    num_rows: int,
    biases: bool,
    threads: int,
    seed: int,
) -> None:
    made = shaped(shape, format, has_biases=biases).program()
    x = random_rows(num_rows, made[1]["router"].cols, seed)
    truth, fast = reference.compile(*made, NO_KV, 1), on_cpu(made, isa, threads)
    want, got = outputs(truth, x), outputs(fast, x)
    assert np.linalg.norm(got - want) <= TOLERANCE.get(format, 0.1) * np.linalg.norm(want)
    assert np.array_equal(fast.expert_loads(), truth.expert_loads())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("format", "down"),
    [("Q4_0", "Q8_0"), ("Q8_0", "F32"), ("BF16", "Q4_0"), ("Q4_0", "I8_ROW"), ("I8_ROW", "Q4_1")],
)
def test_experts_with_another_format_of_down(isa: str, format: str, down: str) -> None:
    made = MoeModel(format=format, down_format=down, hidden=32).program()
    x = random_rows(21, 64, 5)
    want, got = outputs(reference.compile(*made, NO_KV, 1), x), outputs(on_cpu(made, isa, 2), x)
    assert np.linalg.norm(got - want) <= 0.03 * np.linalg.norm(want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_experts_of_every_activation(isa: str, activation: Activation) -> None:
    made = MoeModel(activation=activation, has_biases=True).program()
    x = 3 * random_rows(21, 64, 6)
    want, got = outputs(reference.compile(*made, NO_KV, 1), x), outputs(on_cpu(made, isa, 2), x)
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
def test_expert_bits_of_a_row_do_not_depend_on_other_rows(isa: str, format: str) -> None:
    """Promise 1: the same bits alone, in any order, in chunks, among other rows, on any threads."""
    made = shaped((6, 2, 64, 96), format, layers=2).program()
    x = random_rows(150, made[1]["router"].cols, 0)
    x[:100, 4] += 5  # most rows go to one expert
    executables = [on_cpu(made, isa, threads) for threads in (1, 2, 3)]
    whole = outputs(executables[0], x)
    rng = np.random.default_rng(1)
    for executable in executables:
        assert np.array_equal(outputs(executable, x), whole)
        for row in (0, 99, 149):
            assert np.array_equal(outputs(executable, x[row : row + 1]), whole[row : row + 1])
        for size in (2, 17, 33, 120):
            rows = rng.permutation(150)[:size]
            assert np.array_equal(outputs(executable, x[rows]), whole[rows])
        assert np.array_equal(
            np.concatenate([outputs(executable, part) for part in np.array_split(x, 7)]), whole
        )


@pytest.mark.parametrize(("down", "regions"), [("Q4_0", 2), ("I8_ROW", 3), ("I8_MIXED", 3)])
def test_experts_of_a_single_row_need_few_barriers(down: str, regions: int) -> None:
    """One barrier after gate and up, and one after down."""
    made = MoeModel(format="Q4_0", down_format=down, layers=5).program()
    executable = on_cpu(made, threads=2)
    assert executable.profile(rows_batch(random_rows(1, 64, 0))).barriers == 5 * regions
    assert executable.profile(rows_batch(random_rows(2, 64, 0))).barriers <= 5 * 7


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["F32", "Q8_0", "I8_ROW"])
def test_experts_when_all_rows_choose_one(isa: str, format: str) -> None:
    """More rows than one run of blocks."""
    made = MoeModel(top_k=1, format=format).program()
    x = random_rows(300, 64, 3)
    x[:, 5] += 20
    truth, fast = reference.compile(*made, NO_KV, 1), on_cpu(made, isa, 2)
    want, got = outputs(truth, x), outputs(fast, x)
    assert np.linalg.norm(got - want) <= TOLERANCE.get(format, 0.03) * np.linalg.norm(want)
    assert fast.expert_loads().tolist() == [[0, 0, 0, 0, 0, 300, 0, 0]]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["F32", "BF16", "Q4_0", "I8_ROW"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_keep_not_finite_numbers_in_their_row(isa: str, format: str, scoring: str) -> None:
    """In a logit of the routing or in another number of the row."""
    made = MoeModel(format=format, scoring=scoring, groups=(4, 2)).program()
    x = random_rows(20, 64, 4)
    fast = on_cpu(made, isa, 2)
    good = outputs(fast, x)
    for bad in (np.nan, np.inf, -np.inf):
        for row, column in ((0, 3), (7, 0), (19, 40)):
            spoilt = x.copy()
            spoilt[row, column] = bad
            got = outputs(fast, spoilt)
            assert not np.isfinite(got[row]).any()
            assert np.array_equal(np.delete(got, row, 0), np.delete(good, row, 0))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_route_of_not_finite_logits(scoring: str, groups: tuple[int, int]) -> None:
    made = MoeModel(top_k=3, scoring=scoring, groups=groups).routing()
    x = random_rows(4, 8, 5)
    x[1:, 6] = -np.inf, np.inf, np.nan
    for executable in (reference.compile(*made, NO_KV, 1), on_cpu(made)):
        with np.errstate(invalid="ignore"):
            got = outputs(executable, x)
        assert (
            got[1:, :3].tolist() == [[0, 1, 2]] * 3
            and np.isnan(got[1:, 3:]).all()
            and np.isfinite(got[0]).all()
        )


def test_expert_loads_count_rows() -> None:
    """For each op, and for each program of a plan separately."""
    made = MoeModel(layers=2).program()
    for executable in (reference.compile(*made, NO_KV, 1), on_cpu(made)):
        assert not executable.expert_loads().any()
        other = executable.attach(*made)
        for num_rows, total in ((5, 5), (1, 6)):
            outputs(executable, random_rows(num_rows, 64, num_rows))
            loads = executable.expert_loads()
            assert (loads.shape, loads.dtype) == ((2, 8), np.int64) and (
                loads.sum(axis=1) == 2 * total
            ).all()
        assert other.expert_loads().shape == (2, 8) and not other.expert_loads().any()
        outputs(other, random_rows(3, 64, 0))
        assert (other.expert_loads().sum(axis=1) == 6).all() and np.array_equal(
            executable.expert_loads(), loads
        )
    plain = MoeModel().routing()
    for executable in (reference.compile(*plain, NO_KV, 1), on_cpu(plain)):
        assert executable.expert_loads().shape == (0, 0)


def test_experts_of_two_packed_forms_are_refused() -> None:
    """The rows of a block are packed once for all experts."""
    program, tensors = MoeModel(format="Q4_0").program()
    with pytest.raises(UnsupportedModelError, match=r"tensor gate\.0: .*one form"):
        on_cpu((program, {**tensors, "gate.3": random_stored("F32", 96, 64, 0)}))
    x = random_rows(6, 64, 0)
    mixed = (
        program,
        {**tensors, **{f"{part}.3": random_stored("Q8_0", 96, 64, 0) for part in ("gate", "up")}},
    )
    want, got = outputs(reference.compile(*mixed, NO_KV, 1), x), outputs(on_cpu(mixed), x)
    assert np.linalg.norm(got - want) <= 0.03 * np.linalg.norm(want)  # two formats of one form do


class Native:
    """A plan of ops over three experts in several formats, with given rows and routing."""

    def __init__(self, x: Rows, routing: Rows) -> None:
        self.plan, self.num_rows, dim = _native.Plan("", 2), len(x), x.shape[1]
        self.x, self.routing = (self._embedded(rows) for rows in (x, routing))
        self.outs: list[int] = []
        self.shapes = ((96, dim), (96, dim), (dim, 96))

    def _embedded(self, rows: Rows) -> int:
        buffer = self.plan.add_buffer(rows.shape[1], "step", False)
        self.plan.embed(
            buffer, self.plan.add_weight("F32", *rows.shape, rows.view(np.uint8).reshape(-1), None)
        )
        return buffer

    def add(self, format: str, down: str) -> "Native":
        weights = []
        for i, shape in enumerate(self.shapes):
            stored = [
                random_stored(down if i == 2 else format, *shape, 10 * i + e) for e in range(3)
            ]
            weights.append(
                [
                    self.plan.add_weight(t.format.name, *shape, t.parts["codes"], None, t.scales)
                    for t in stored
                ]
            )
        self.outs.append(self.plan.add_buffer(self.shapes[0][1], "step", False))
        self.plan.experts(self.outs[-1], self.x, self.routing, tuple(weights), ([], [], []), "silu")
        return self

    def results(self) -> list[Rows]:
        run_rows(self.plan, self.num_rows)
        return [np.array(self.plan.floats(out, self.num_rows)) for out in self.outs]


def test_expert_layers_of_different_formats_share_buffers() -> None:
    """Including a format that packs whole rows after gate and up, and one that packs groups."""
    x, routing = (
        random_rows(40, 256, 1),
        np.random.default_rng(2).integers(0, 3, (40, 4)).astype(np.float32),
    )
    pairs = [
        ("Q4_0", "Q8_0"),
        ("Q4_K", "F32"),
        ("I8_ROW", "I8_ROW"),
        ("F32", "Q4_1"),
        ("Q8_0", "I8_ROW"),
        ("BF16", "BF16"),
    ]
    together = Native(x, routing)
    for pair in pairs:
        together.add(*pair)
    for pair, got in zip(pairs, together.results(), strict=True):
        assert np.array_equal(got, Native(x, routing).add(*pair).results()[0])


@pytest.mark.parametrize("num_rows", [1, 6])
def test_experts_with_hostile_routing(num_rows: int) -> None:
    """An invalid expert number counts as the first expert; a row may choose an expert twice."""
    x = random_rows(num_rows, 64, 1)
    wrong, right = (np.full((num_rows, 8), 0.5, np.float32) for _ in range(2))
    wrong[:, :4], right[:, :4] = [2, 2, 1.75, 0], [2, 2, 1, 0]
    for row, numbers in enumerate(
        [[-1, np.nan, np.inf, 3], [-np.inf, 1e30, 2**31, 65536], [0, -0.5, 2.999, 2]][
            : num_rows - 1
        ]
    ):
        wrong[row, :4], right[row, :4] = numbers, [0, 0, 2 * (row == 2), 2 * (row == 2)]
    got, want = (Native(x, routing).add("Q4_0", "Q4_0").results()[0] for routing in (wrong, right))
    assert np.array_equal(got, want) and np.isfinite(got).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": ([0, 0], [0, 0], [1])}, "each expert has gate, up and down"),
        ({"weights": ([], [], [])}, "each expert has gate, up and down"),
        ({"weights": ([0, 1], [0, 0], [1, 1])}, "of one shape"),
        ({"weights": ([0, 2], [0, 0], [1, 1])}, "one form"),
        ({"weights": ([0, 0], [0, 0], [0, 0])}, "of one shape"),
        ({"weights": ([0, 9], [0, 0], [1, 1])}, "no such weight"),
        ({"biases": ([0], [], [])}, "all experts have a bias"),
        ({"biases": ([0, 0], [], [0, 0])}, "not as long"),
        ({"routing": 3}, "a number and a weight"),
        ({"routing": 5}, "a number and a weight"),
        ({"out": 2}, "of one shape|cannot overwrite"),
        ({"out": 4}, "the same rows of a step"),
        ({"activation": "sine"}, "activation"),
    ],
)
def test_invalid_experts_are_refused(change: dict, message: str) -> None:
    plan = _native.Plan("", 1)
    for width, rows in (
        (64, "step"),
        (64, "step"),
        (4, "step"),
        (3, "step"),
        (64, "logit"),
        (2050, "step"),
    ):
        plan.add_buffer(width, rows, False)
    for rows, cols in ((32, 64), (64, 32)):
        plan.add_weight(
            "Q8_0", rows, cols, random_stored("Q8_0", rows, cols, 0).parts["codes"], None
        )
    plan.add_weight("F32", 32, 64, random_stored("F32", 32, 64, 0).parts["codes"], None)
    plan.add_vector(np.ones(32, np.float32))
    right = {
        "out": 0,
        "x": 1,
        "routing": 2,
        "weights": ([0, 0], [0, 0], [1, 1]),
        "biases": ([0, 0], [], []),
        "activation": "silu",
    }
    plan.experts(*right.values())
    with pytest.raises(ValueError, match=message):
        plan.experts(*(right | change).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "of which there are"),
        ({"top_k": 5}, "of which there are"),
        ({"groups": (3, 1)}, "of one size"),
        ({"groups": (4, 5)}, "of one size"),
        ({"groups": (0, 0)}, "of one size"),
        ({"groups": (4, 1)}, "of which there are"),
        ({"scoring": "argmax"}, "softmax"),
        ({"factor": float("nan")}, "a factor is a number"),
        ({"bias": 0}, "not as long"),
        ({"out": 0}, "for each choice"),
        ({"out": 2}, "for each choice"),
    ],
)
def test_invalid_route_is_refused(change: dict, message: str) -> None:
    plan = _native.Plan("", 1)
    for width, rows in ((8, "step"), (6, "step"), (6, "logit")):
        plan.add_buffer(width, rows, False)
    plan.add_vector(np.ones(7, np.float32))
    right = {
        "out": 1,
        "x": 0,
        "top_k": 3,
        "scoring": "softmax",
        "normalised": True,
        "factor": 1.0,
        "groups": (4, 2),
        "bias": -1,
    }
    plan.route(*right.values())
    with pytest.raises(ValueError, match=message):
        plan.route(*(right | change).values())


@pytest.fixture(scope="module")
def model() -> tuple[ModelSpec, Tensors]:
    """A model with six experts in each layer and top_k 2."""
    return tiny_model(5, dim=64, architecture="mixtral", experts=ExpertSpec(6, 2, 96))


@pytest.mark.parametrize("isa", ISAS)
def test_moe_model_equals_reference(model: tuple[ModelSpec, Tensors], isa: str) -> None:
    """Experts of the last layer compute only the logit rows."""
    spec, tensors = model
    program, kv = trace_model(spec, tensors), KvConfig((BLOCKS,), 32, "f32")
    truth = reference.compile(program, tensors, kv, 1)
    fused, plain = (
        cpu.CpuExecutable(program, tensors, kv, 2, isa, lower=lower)
        for lower in (cpu.lower, cpu.lower_unfused)
    )
    rows, logit_rows = 0, 0
    for batch in random_steps(np.random.default_rng(2), spec.vocab_size, trees=True):
        batch = batch._replace(logit_rows=batch.logit_rows[::3], seq_of=batch.seq_of[::3])
        want, got = forward(truth, batch).logits, forward(fused, batch).logits
        assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)
        assert np.array_equal(got, forward(plain, batch).logits)
        rows, logit_rows = rows + len(batch.tokens), logit_rows + len(batch.logit_rows)
    assert fused.expert_loads().sum(axis=1).tolist() == [2 * rows, 2 * logit_rows]
    assert np.array_equal(fused.expert_loads(), truth.expert_loads())


def test_engine_reports_expert_loads(model: tuple[ModelSpec, Tensors]) -> None:
    """Each request also gets the tokens that it gets alone."""
    requests = [
        ([1 + i % 50 for i in range(n)], SamplingParams(max_tokens=9, seed=n)) for n in (3, 40, 17)
    ]
    alone = [run_all(tiny_engine(model, "cpu"), [request])[0] for request in requests]
    engine = tiny_engine(model, "cpu", slots=512, max_num_batched_tokens=16, threads=2)
    assert [
        [output.token_ids for output in result.outputs] for result in run_all(engine, requests)
    ] == [[output.token_ids for output in result.outputs] for result in alone]
    stats = engine.stats()
    loads = np.array(stats.expert_loads)
    assert loads.shape == (2, 6) and loads[0].sum() == 2 * stats.rows >= loads[1].sum() > 0
