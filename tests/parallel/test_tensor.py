"""Tensor parallel programs, run in lock-step, give the bits of one rank."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.checkpoint.key_biases import split_key_biases
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.config import KvConfig
from headrace.errors import UnsupportedModelError
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.parallel.mesh import Mesh
from headrace.parallel.tensor import TensorParallel
from headrace.program.collective import ColumnsToRows, GatherShares, NormShare
from headrace.program.ops import Add
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from tests.backend.batches import Sequence, batch_of
from tests.families import VARIANTS, save_model
from tests.parallel.lockstep import LockStep
from tests.parallel.models import models, steps, with_logits
from tests.tiny import Tensors, tiny_model

_SAVED: dict[str, Checkpoint] = {}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def checkpoint_of(name: str, folder: Path) -> Checkpoint:
    if name not in _SAVED:
        save_model(name, folder / name)
        _SAVED[name] = open_checkpoint(folder / name)
    return _SAVED[name]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_tensor_parallel_gives_the_bits_of_one_rank(name: str, ranks: int, saved: Path) -> None:
    checkpoint = checkpoint_of(name, saved)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    if ranks > checkpoint.spec.num_heads:
        with pytest.raises(UnsupportedModelError, match="4 ranks cannot share 3 attention heads"):
            TensorParallel(program, 0, ranks).rewritten()
    else:
        assert_equal_bits(
            program,
            [[TensorParallel(program, rank, ranks).rewritten() for rank in range(ranks)]],
            checkpoint.tensors,
        )


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_large_key_biases(ranks: int) -> None:
    """Two ranks have a KV head each, or two ranks have one together."""
    spec, tensors = tiny_model(0, qkv_bias=True, vocab=101)
    bias = StoredTensor.from_floats("layers.1.k_bias", np.linspace(-40, 40, 16, dtype=np.float32))
    tensors = split_key_biases(spec, tensors | {bias.name: bias})
    assert "layers.1.k_bias_large" in tensors
    program = trace_model(spec, tensors)
    assert_equal_bits(
        program,
        [[TensorParallel(program, rank, ranks).rewritten() for rank in range(ranks)]],
        tensors,
    )


def assert_equal_bits(program: Program, stages: list[list[Program]], tensors: Tensors) -> None:
    groups = len(program.kv_groups)
    kv = KvConfig((4,) * groups, 16, "f32")
    one, many = (
        LockStep([[program]], tensors, kv),
        LockStep(stages, tensors, kv),
    )
    for batch in steps(16, groups):
        (expected,), results = one.logits(batch), many.logits(batch)
        assert results
        for logits in results:
            np.testing.assert_array_equal(logits, expected)


STAGES = [
    Mesh(tensor, pipeline) for tensor, pipeline in [(1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (3, 2)]
]
SEQUENCE_PARALLEL = [
    Mesh(tensor, pipeline, sequence=True) for tensor, pipeline in [(2, 1), (3, 1), (2, 2)]
]


@pytest.mark.parametrize("mesh", [*STAGES, *SEQUENCE_PARALLEL])
@pytest.mark.parametrize("name", VARIANTS)
def test_meshes_give_the_bits_of_one_rank(name: str, mesh: Mesh, saved: Path) -> None:
    checkpoint = checkpoint_of(name, saved)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    stages = [
        [mesh.program(program, rank) for rank in mesh.group(stage)]
        for stage in range(mesh.pipeline)
    ]
    layers = [
        layer for (first, *_) in stages for group in first.kv_groups for layer in group.layers
    ]
    assert sorted(layers) == sorted(layer for group in program.kv_groups for layer in group.layers)
    assert_equal_bits(program, stages, checkpoint.tensors)


def test_pipeline_layers(saved: Path) -> None:
    checkpoint = checkpoint_of("qwen3", saved)
    program, mesh = trace_model(checkpoint.spec, checkpoint.tensors), Mesh(1, 2, layers=(1, 2))
    stages = [mesh.program(program, rank) for rank in (1, 0)]
    assert [sum(len(group.layers) for group in stage.kv_groups) for stage in stages] == [1, 2]
    assert_equal_bits(program, [[stage] for stage in stages], checkpoint.tensors)
    for layers in ((1, 1), (3,), (1, 1, 1)):
        with pytest.raises(UnsupportedModelError, match="do not give 3 layers in 2 stages"):
            Mesh(1, 2, layers=layers).program(program, 0)


def test_sequence_parallel_splits_the_residual_stream_by_columns(saved: Path) -> None:
    checkpoint = checkpoint_of("qwen3", saved)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    rank = TensorParallel(program, 1, 2, sequence=True).rewritten()
    sums = [op for op in program.ops if isinstance(op, Add)]
    assert [op.out.width for op in rank.ops if isinstance(op, Add)] == [
        op.out.width // 2 for op in sums
    ]
    norms = [op for op in rank.ops if isinstance(op, NormShare)]
    assert (
        len(norms)
        == sum(isinstance(op, ColumnsToRows) for op in rank.ops)
        == sum(isinstance(op, GatherShares) for op in rank.ops)
    )
    assert len(norms) == sum(
        op.out.rows == "step" for op in sums
    )  # later norms have only rows with logits


@given(model=models(), ranks=st.integers(1, 4), sequence=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_shapes_formats_and_draft_trees_give_the_bits_of_one_rank(
    model: tuple[ModelSpec, Tensors], ranks: int, sequence: bool, data: st.DataObject
) -> None:
    spec, tensors = model
    assume(ranks <= spec.num_heads)
    program = trace_model(spec, tensors)
    programs = [
        TensorParallel(program, rank, ranks, sequence=sequence).rewritten() for rank in range(ranks)
    ]
    groups = len(program.kv_groups)
    kv = KvConfig((4,) * groups, 16, data.draw(st.sampled_from(["f32", "bf16"])))
    one, many = LockStep([[program]], tensors, kv), LockStep([programs], tensors, kv)
    sequences = [Sequence([1, 3], 16), Sequence([2, 0], 16)]
    tokens = st.integers(0, spec.vocab_size - 1)
    for _ in range(2):
        known = [data.draw(st.lists(tokens, min_size=1, max_size=4)) for _ in sequences]
        drafts = [data.draw(st.lists(tokens, max_size=4)) for _ in sequences]
        parents = [
            [data.draw(st.integers(-1, node - 1)) for node in range(len(drafted))]
            for drafted in drafts
        ]
        batch = batch_of(sequences, known, list(zip(drafts, parents, strict=True)), True, groups)
        rows = range(len(batch.tokens))
        batch = with_logits(batch, data.draw(st.sets(st.sampled_from(rows))))
        (expected,), results = one.logits(batch), many.logits(batch)
        for logits in results:
            np.testing.assert_array_equal(logits, expected)
        for sequence, decided in zip(sequences, known, strict=True):
            sequence.computed += len(decided)


@given(model=models(), ranks=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_each_row_of_a_matrix_is_on_one_rank(model: tuple[ModelSpec, Tensors], ranks: int) -> None:
    """If no ranks share a KV head."""
    spec, tensors = model
    assume(ranks <= spec.num_kv_heads)
    program = trace_model(spec, tensors)
    found = [TensorParallel(program, rank, ranks).rewritten() for rank in range(ranks)]
    matrices = {w.name: w for op in program.ops for w in op.matrices()}
    shares = [{w.name: w for op in rank.ops for w in op.matrices()} for rank in found]
    assert sum(w.nbytes for rank in shares for w in rank.values()) == sum(
        w.nbytes for w in matrices.values()
    )
    for name, matrix in matrices.items():
        rows = sorted(
            tuple(map(int, share.partition("[")[2][:-1].split(":")))
            for rank in shares
            for share in rank
            if share.startswith(f"{name}[")
        )
        assert [first for first, _ in rows] == [0, *(last for _, last in rows[:-1])] and rows[-1][
            1
        ] == matrix.rows
