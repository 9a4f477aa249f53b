"""Ranks on the cpu backend: the bits of one rank, and the predicted bytes of exchanges."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.backend.cpu.executable import CpuExecutable, lower, lower_unfused
from headrace.batch import ints
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import KvConfig
from headrace.errors import RankLostError
from headrace.model import linear_weights, trace_model
from headrace.model.spec import ModelSpec
from headrace.parallel.collectives import Floats
from headrace.parallel.mesh import Mesh, adapter_share
from headrace.program.adapter import LowRank
from headrace.program.collective import Collective
from headrace.program.op import Op, StepSize
from headrace.program.ops import Attention, KvWrite, Linear
from headrace.program.trace import Program
from tests.backend.batches import Sequence, batch_of
from tests.families import VARIANTS, save_model
from tests.key_roundings import roundings
from tests.parallel.models import models, steps, with_logits
from tests.parallel.threads import Threads
from tests.tiny import Tensors, tiny_model

MESHES = [
    Mesh(1, 2),
    Mesh(2, 1),
    Mesh(3, 1),
    Mesh(2, 2),
    Mesh(2, 1, sequence=True),
    Mesh(3, 2, sequence=True),
]
WITH_EXPERTS = [
    name
    for name, variant in VARIANTS.items()
    if "num_experts_per_tok" in variant.options or variant.family == "mixtral"
]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [(name, mesh) for name in VARIANTS for mesh in MESHES]
    + [(name, Mesh(2, 2, shares_experts=False)) for name in WITH_EXPERTS],
)
def test_cpu_ranks_give_the_bits_of_one_rank(name: str, mesh: Mesh, tmp_path: Path) -> None:
    save_model(name, tmp_path / name)
    checkpoint = open_checkpoint(tmp_path / name)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    groups = len(program.kv_groups)
    kv = KvConfig((4,) * groups)
    for fused in (True, False):
        one = CpuExecutable(
            program, checkpoint.tensors, kv, 1, "", lower=lower if fused else lower_unfused
        )
        many = Threads(mesh, program, checkpoint.tensors, kv, fused)
        for batch in steps(32, groups):
            one.run(batch, batch.tokens)
            before = [transport.received_bytes for transport in many.transports]
            results = many.logits(batch)
            assert len(results) == mesh.tensor
            for logits in results:
                np.testing.assert_array_equal(logits, one.logits(batch))
            counts = np.diff(batch.row_start).tolist()
            step = StepSize(
                tuple(zip(batch.context_len.tolist(), counts, strict=True)),
                len(batch.logit_rows),
                0,
            )
            for transport, rank, start in zip(many.transports, many.ranks, before, strict=True):
                predicted = sum(
                    op.link_bytes(step) for op in rank.program.ops if isinstance(op, Collective)
                )
                assert transport.received_bytes - start == predicted
        many.close()


@given(
    model=models(),
    mesh=st.builds(Mesh, st.integers(1, 3), st.integers(1, 2), sequence=st.booleans()),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_random_shapes_formats_draft_trees_and_adapters(
    model: tuple[ModelSpec, Tensors], mesh: Mesh, data: st.DataObject
) -> None:
    spec, tensors = model
    assume(mesh.tensor <= spec.num_heads)
    program = trace_model(spec, tensors)
    groups = len(program.kv_groups)
    dtype = data.draw(st.sampled_from(["bf16", "f32", "int8", "int4", "k8v4"]))
    rounding = roundings(program) if dtype == "int4" else ()
    kv = KvConfig((4,) * groups, dtype=dtype, key_rounding=rounding)
    activations = data.draw(st.sampled_from(["int8", "f32"]))
    one = CpuExecutable(program, tensors, kv, 1, "", activations=activations)
    many = Threads(mesh, program, tensors, kv, activations=activations)
    rng, shapes = (
        np.random.default_rng(0),
        {name: (tensors[name].rows, tensors[name].cols) for name in linear_weights(spec)},
    )
    adapter = {
        name: LowRank(
            rng.standard_normal((2, cols), np.float32),
            rng.standard_normal((rows, 2), np.float32),
            0.1,
        )
        for name, (rows, cols) in shapes.items()
    }
    assert {one.add_adapter(adapter)} == {
        rank.add_adapter(adapter_share(rank.program, adapter)) for rank in many.ranks
    }
    sequences = [Sequence([1, 3], 32), Sequence([2, 0], 32)]
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
        batch = with_logits(batch, data.draw(st.sets(st.sampled_from(rows))))._replace(
            adapters=ints([data.draw(st.sampled_from([-1, 0])) for _ in sequences])
        )
        one.run(batch, batch.tokens)
        for logits in many.logits(batch):
            np.testing.assert_array_equal(logits, one.logits(batch))
        for sequence, decided in zip(sequences, known, strict=True):
            sequence.computed += len(decided)
    many.close()


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(4), Mesh(1, 2), Mesh(1, 4), Mesh(2, 2)])
@pytest.mark.parametrize("tied", [True, False])
def test_weight_and_kv_bytes_of_even_shapes(mesh: Mesh, tied: bool) -> None:
    """A rank has the bytes of its program and of the split: at most its share and 5 %."""
    sizes = {"layers": 4, "dim": 256, "heads": 8, "kv_heads": 4, "ffn": 512, "vocab": 256}
    spec, tensors = tiny_model(1, format="Q8_0", tied_embeddings=tied, **sizes)
    program, kv = trace_model(spec, tensors), KvConfig((8,))
    whole = CpuExecutable(program, tensors, kv, 1, "")
    matrix = {
        name: weight.nbytes for name, weight in whole.program.weights.items() if weight.rows > 1
    }
    many = Threads(mesh, program, tensors, kv)
    layers = mesh.layer_stages(program) if mesh.pipeline > 1 else dict.fromkeys(range(4), 0)
    for number, rank in enumerate(many.ranks):
        stage = mesh.stage(number)
        own = {
            name
            for name in matrix
            if name.startswith("layers.") and layers[int(name.split(".")[1])] == stage
        }
        own |= {"embed"} if stage == 0 or (tied and stage == mesh.pipeline - 1) else set()
        own |= {"head"} if not tied and stage == mesh.pipeline - 1 else set()
        vectors = sum(weight.nbytes for weight in rank.program.weights.values() if weight.rows == 1)
        assert (
            rank.plan.weight_bytes
            == rank.program.weight_bytes
            == vectors + sum(matrix[name] // mesh.tensor for name in own)
        )
        assert sum(rank.plan.kv_bytes) * mesh.tensor * 4 == sum(whole.plan.kv_bytes) * list(
            layers.values()
        ).count(stage)
    if mesh.pipeline == 1:
        assert (
            max(rank.plan.weight_bytes for rank in many.ranks)
            <= (1 / mesh.ranks + 0.05) * whole.plan.weight_bytes
        )
    many.close()


KV_HEADS = {1: [3], 2: [1, 2], 3: [1, 1, 1]}
"""KV heads of the default model on each rank."""


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(3), Mesh(1, 2), Mesh(2, 2), Mesh(2, sequence=True)])
def test_weight_and_kv_bytes_of_the_default_model(mesh: Mesh) -> None:
    """It has 9 heads on 3 KV heads, so the shares are uneven."""
    checkpoint = open_checkpoint(resolve("smollm2"))
    spec, program, kv = (
        checkpoint.spec,
        trace_model(checkpoint.spec, checkpoint.tensors),
        KvConfig((2,)),
    )
    whole = CpuExecutable(program, checkpoint.tensors, kv, 1, "")
    many = Threads(mesh, program, checkpoint.tensors, kv)
    layers = (
        mesh.layer_stages(program)
        if mesh.pipeline > 1
        else dict.fromkeys(range(spec.num_layers), 0)
    )
    by_heads = {
        name
        for op in program.ops
        if isinstance(op, KvWrite | Attention)
        for name in projections(program, op)
    }
    assert len(by_heads) == 3 * spec.num_layers
    for number, rank in enumerate(many.ranks):
        stage, heads = mesh.stage(number), KV_HEADS[mesh.tensor][number % mesh.tensor]
        mine = {f"layers.{layer}" for layer, at in layers.items() if at == stage}
        expected = 0
        for name, weight in whole.program.weights.items():
            if name.rpartition(".")[0] in mine or (
                not name.startswith("layers.") and stage in ends(name, mesh)
            ):
                rows = (
                    weight.rows * heads // 3
                    if name in by_heads
                    else weight.rows // mesh.tensor
                    if weight.rows > 1
                    else 1
                )
                expected += weight.nbytes // weight.rows * rows
        assert rank.plan.weight_bytes == rank.program.weight_bytes == expected
        assert sum(rank.plan.kv_bytes) * 3 * spec.num_layers == sum(
            whole.plan.kv_bytes
        ) * heads * len(mine)
    many.close()


def projections(program: Program, op: Op) -> Iterator[str]:
    """Matrices whose products an op reads, rotated or not."""
    writers = {out.id: op for op in program.ops if (out := op.output())}
    for writer in (writers[value.id] for value in op.inputs()):
        yield from (
            (weight.name for weight in writer.matrices())
            if isinstance(writer, Linear)
            else projections(program, writer)
        )


def ends(name: str, mesh: Mesh) -> set[int]:
    """Stages with a weight outside the layers. The embedding, tied to the head, is in two."""
    return {mesh.pipeline - 1} if "norm" in name else {0, mesh.pipeline - 1}


def test_run_after_a_failed_exchange() -> None:
    """The failed run has moved its buffers; the next run must read them at their new place."""
    spec, tensors = tiny_model(1)
    program, kv, mesh = trace_model(spec, tensors), KvConfig((4,)), Mesh(2)
    one, many = CpuExecutable(program, tensors, kv, 1, ""), Threads(mesh, program, tensors, kv)
    gather = many.transports[0].all_gather
    rows = {
        1: batch_of([Sequence([0], 32)], [[1]], [([], [])], False),
        20: batch_of([Sequence([1], 32)], [[2] * 20], [([], [])], False),
    }
    many.logits(rows[1])
    for transport in many.transports:
        transport.all_gather = lost  # type: ignore[method-assign]
    with pytest.raises(RankLostError):
        many.logits(rows[20])
    for transport in many.transports:
        del transport.all_gather
    assert many.transports[0].all_gather == gather
    other = rows[1]._replace(tokens=ints([7]))
    one.run(other, other.tokens)
    for logits in many.logits(other):
        np.testing.assert_array_equal(logits, one.logits(other))
    many.close()


def lost(*_: object) -> list[Floats]:
    raise RankLostError("a rank does not respond")
