"""The costs of ops equal the counted operations of the reference backend."""

from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.backend import lower_program
from headrace.backend.reference.executable import ReferenceExecutable
from headrace.backend.reference.ops import Step
from headrace.backend_traits import KvDtype, traits_of
from headrace.batch import RaggedBatch
from headrace.config import KvConfig
from headrace.program import moe, ops
from headrace.program.kv import number_bytes
from headrace.program.op import Op, StepSize, Value, Weight
from headrace.program.trace import Program
from tests.backend.batches import Sequence, batch_of
from tests.program.counting import Memory, Tally
from tests.program.shapes import SHAPES, VOCAB, decoder, families, moe_models, others
from tests.tiny import Tensors

BLOCK = 4
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=4
)
"""Context, known rows and draft rows of each sequence."""


def programs(shape: dict[str, Any]) -> list[tuple[Program, Tensors]]:
    """Each program op by op and fused."""
    made = [decoder(shape), others(shape), families(shape), *moe_models(shape)]
    return [
        (lower_program(backend, program, tensors), tensors)
        for program, tensors in made
        for backend in ("reference", "cpu")
    ]


class CountedStep:
    """A step of the reference backend on counting arrays."""

    def __init__(
        self, program: Program, tensors: Tensors, batch: RaggedBatch, num_blocks: int
    ) -> None:
        self.program = program
        executable = ReferenceExecutable(
            program, tensors, KvConfig((num_blocks,) * len(program.kv_groups), BLOCK, "f32")
        )
        self.tally = Tally()
        self.weights: dict[str, Memory] = {}
        for name, values in executable.weights.items():
            executable.weights[name], self.weights[name] = self.tally.memory(values)
        self.kv: list[Memory] = []
        for store in executable.stores:
            store.keys, keys = self.tally.memory(store.keys)
            store.values, values = self.tally.memory(store.values)
            self.kv += [keys, values]
        first = program.ops[0].output()
        assert first
        inputs = np.random.default_rng(0).standard_normal((len(batch.tokens), first.width))
        positions = self.tally.counted(batch.positions)
        self._step = Step(
            executable, batch._replace(positions=positions, inputs=self.tally.counted(inputs))
        )

    def run(self, op: Op, number_bytes: float) -> tuple[int, float]:
        """Counted operations and bytes of the op; `number_bytes`: bytes of a KV number."""
        self.tally.clear()
        self._step.run(op)
        nbytes = {weight.name: weight.nbytes for weight in op.weights()}
        weights = sum(
            memory.was_read.mean() * nbytes.get(name, 0) for name, memory in self.weights.items()
        )
        numbers = sum(int(memory.was_read.sum() + memory.was_written.sum()) for memory in self.kv)
        return 2 * self.tally.multiply_adds or self.tally.single, weights + numbers * number_bytes

    @property
    def strays(self) -> list[str]:
        """Names of the weights that the last op has read."""
        return [name for name, memory in self.weights.items() if memory.was_read.any()]

    def experts(self, op: moe.Experts) -> list[int]:
        """The experts that rows went to."""
        return (
            np.unique(np.asarray(self._step.rows[op.routing.id])[:, : op.top_k])
            .astype(int)
            .tolist()
        )


def batch_and_size(
    seqs: Many[tuple[int, int, int]], num_logits: int
) -> tuple[RaggedBatch, StepSize, int]:
    """A batch of these sequences, its step size, and the number of KV blocks. Tokens differ as far
    as the vocabulary allows.
    """
    sequences, known, drafts, token, block = [], [], [], 0, 0
    for context, rows, nodes in seqs:
        num_blocks = -(-(context + rows + nodes) // BLOCK)
        sequences.append(Sequence([block + num_blocks - 1 - i for i in range(num_blocks)], BLOCK))
        sequences[-1].computed = context
        tokens = [(token + i) % VOCAB for i in range(rows + nodes)]
        known.append(tokens[:rows])
        drafts.append((tokens[rows:], [*range(-1, nodes - 1)]))
        token, block = token + rows + nodes, block + num_blocks
    batch = batch_of(sequences, known, drafts, trees=False)
    logit_rows, pooled_rows = (
        batch.logit_rows[: 1 + num_logits % len(batch.tokens)],
        batch.logit_rows[num_logits % 3 :],
    )
    size = StepSize(tuple((c, r + d) for c, r, d in seqs), len(logit_rows), 0, len(pooled_rows))
    return batch._replace(logit_rows=logit_rows, pooled_rows=pooled_rows), size, block


@settings(max_examples=8, deadline=None)
@given(
    shape=SHAPES,
    dtype=st.sampled_from(traits_of("cpu").kv_dtypes),
    seqs=SEQUENCES,
    num_logits=st.integers(0, 100),
)
@example(
    {"kv_heads": 2, "groups": 2, "head_dim": 32, "rotated": 4, "window": (7, 0), "format": "Q4_0"},
    "int8",
    [(20, 19, 3)] * 3,
    4,
)
def test_costs_equal_the_counted_operations_and_bytes(
    shape: dict[str, Any], dtype: KvDtype, seqs: list[tuple[int, int, int]], num_logits: int
) -> None:
    batch, size, num_blocks = batch_and_size(seqs, num_logits)
    for program, tensors in programs(shape):
        size = size._replace(
            kv_bytes=number_bytes(program.kv_groups, dtype) if program.kv_groups else 0
        )
        step = CountedStep(
            program, tensors, batch._replace(kv=batch.kv * len(program.kv_groups)), num_blocks
        )
        for op in program.ops:
            flops, nbytes = step.run(op, size.kv_bytes)
            assert isinstance(op.flops(size), int) and isinstance(op.bytes(size), int)
            assert op.flops(size) == flops, op
            read, share = op.weights(), 1.0
            if isinstance(
                op, moe.Experts
            ):  # it says what is to be expected, and here some experts have been chosen
                chosen = step.experts(op)
                share = len(chosen) / op.distinct_experts(len(batch.tokens))
                read = [weight for weight in read if int(weight.name.split(".")[1]) in chosen]
            assert op.bytes(size) * share == pytest.approx(nbytes, abs=1 + share), op
            assert set(step.strays) == {weight.name for weight in read}


def test_costs_cover_every_op() -> None:
    shape = {
        "kv_heads": 1,
        "groups": 2,
        "head_dim": 32,
        "rotated": 32,
        "window": 0,
        "format": "F32",
    }
    every = {
        op
        for op in (vars(ops) | vars(moe)).values()
        if isinstance(op, type) and issubclass(op, Op) and op is not Op
    }
    # Rewritten programs have them: tests/engine/test_activation_sparsity.py, test_early_exit.py.
    every -= {ops.ExitChoice, ops.Threshold}
    assert every == {type(op) for program, _ in programs(shape) for op in program.ops}


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 8), (5, 5), (1, 1)])
@pytest.mark.parametrize("rows", [0, 1, 3, 20])
def test_distinct_experts_equals_the_mean_of_random_routings(
    experts: int, top_k: int, rows: int
) -> None:
    x, weight = Value(0, 4, "step"), Weight("w", 4, 4, 64)
    op = moe.Experts(x, x, Value(1, 2 * top_k, "step"), *((weight,) * experts,) * 3, "silu")
    rng = np.random.default_rng(0)
    choices = [
        np.concatenate([np.zeros(0), *(rng.permutation(experts)[:top_k] for _ in range(rows))])
        for _ in range(3000)
    ]
    assert op.distinct_experts(rows) == pytest.approx(
        np.mean([len(set(c.tolist())) for c in choices]), rel=0.02
    )


def test_a_draft_tree_costs_no_more_than_a_chain() -> None:
    """The op states the cost of a chain for both."""
    shape = {
        "kv_heads": 1,
        "groups": 2,
        "head_dim": 32,
        "rotated": 32,
        "window": 0,
        "format": "F32",
    }
    program, tensors = decoder(shape)
    attention = next(op for op in program.ops if isinstance(op, ops.Attention))
    size = StepSize(((5, 4),), 4, 4)
    seen = []
    for parents in ([-1, 0, 1], [-1, 0, 0], [-1, -1, -1]):
        sequence = Sequence([0, 1, 2], BLOCK)
        sequence.computed = 5
        step = CountedStep(
            program, tensors, batch_of([sequence], [[1]], [([2, 3, 4], parents)], trees=True), 3
        )
        for op in program.ops[: program.ops.index(attention)]:
            step.run(op, 4)
        seen.append(step.run(attention, 4))
    assert seen[0] == (attention.flops(size), attention.bytes(size))
    assert seen[0][0] > seen[1][0] > seen[2][0] and seen[0][1] == seen[1][1] == seen[2][1]
