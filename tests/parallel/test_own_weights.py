"""Adapters with weights of their own on ranks: the bits of one rank."""

from concurrent.futures import wait
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.backend.cpu.executable import CpuExecutable
from headrace.batch import RaggedBatch, ints
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.config import KvConfig
from headrace.errors import UnsupportedModelError
from headrace.model import linear_weights, tensor_shapes, trace_model
from headrace.parallel.commands import adapter_from_arrays, adapter_to_arrays
from headrace.parallel.cpu_rank import CpuRank
from headrace.parallel.mesh import Mesh
from headrace.parallel.rank import RankConfig
from headrace.program.adapter import Adapter, LowRank, OwnWeight, TokenRows
from headrace.program.trace import Program
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.spec import encode_numbers
from tests.backend.batches import Sequence, batch_of
from tests.families import VOCAB, save_model
from tests.parallel.threads import Threads

FAMILIES = ("qwen2", "smollm2", "mixtral", "gpt2")
MESHES = (Mesh(2, 1), Mesh(1, 2), Mesh(2, 2), Mesh(3, 1, sequence=True))
LENGTHS = (5, 3, 4, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def checkpoint_of(family: str, folder: Path) -> Checkpoint:
    save_model(family, folder / family)
    return open_checkpoint(folder / family)


def random(rng: np.random.Generator, *shape: int) -> Any:
    return (0.3 * rng.standard_normal(shape)).astype(np.float32)


def adapter_of(program: Program, seed: int) -> Adapter:
    """Changes of every kind, of every second weight of a program; some in bf16."""
    rng, changes = np.random.default_rng(seed), dict[str, LowRank | OwnWeight]()
    weights = [weight for name, weight in sorted(program.weights.items()) if name != "embed"]
    tied = "head" not in program.weights
    for i, weight in enumerate(weights[seed % 2 :: 2]):
        rows, cols = weight.rows, weight.cols
        if rows == 1:
            changes[weight.name] = OwnWeight(added=random(rng, cols))
            continue
        delta = LowRank(random(rng, 3, cols), random(rng, rows, 3), 0.5)
        words = encode_numbers(random(rng, rows, cols), "bf16").reshape(-1).view(np.uint8)
        values = StoredTensor.from_bytes(weight.name, FORMATS["BF16"], (rows, cols), words)
        is_expert = "experts" in weight.name
        kinds = [
            OwnWeight(values=values),
            OwnWeight(delta=delta, row_norms=1 + np.abs(random(rng, rows))),
            OwnWeight(values=StoredTensor.from_floats(weight.name, random(rng, rows, cols))),
            OwnWeight(delta=delta) if is_expert else delta,
        ]
        changes[weight.name] = kinds[i % 4]
    width = program.weights["embed"].cols
    tokens = TokenRows(np.array([3, 7, VOCAB - 1]), random(rng, 3, width))
    changes["embed"] = OwnWeight(rows=tokens, col_norms=1 + np.abs(random(rng, width)))
    if tied:
        head = LowRank(random(rng, 2, width), random(rng, VOCAB, 2), 1.0)
        changes["head"] = OwnWeight(delta=head)
    if "layers.0.down" in program.weights:
        changes.setdefault("layers.0.down_bias", OwnWeight(added=random(rng, width)))
    return changes


def low_rank_adapter(checkpoint: Checkpoint) -> Adapter:
    rng, shapes = np.random.default_rng(7), tensor_shapes(checkpoint.spec)
    return {
        name: LowRank(random(rng, 2, shapes[name][1]), random(rng, shapes[name][0], 2), 0.5)
        for name in sorted(linear_weights(checkpoint.spec))
    }


class Ranks:
    def __init__(self, mesh: Mesh, program: Program, checkpoint: Checkpoint, kv: KvConfig) -> None:
        self.threads = Threads(mesh, program, checkpoint.tensors, kv)
        self.ranks = [
            CpuRank(
                RankConfig(
                    backend="cpu",
                    mesh=mesh,
                    rank=number,
                    kv=kv,
                    threads=1,
                    activations="int8",
                ),
                program,
                checkpoint.tensors,
                transport,
            )
            for number, transport in enumerate(self.threads.transports)
        ]

    def add(self, adapter: Adapter) -> set[int]:
        sent = adapter_from_arrays(adapter_to_arrays(adapter))
        return {rank.add_adapter(adapter if not i else sent) for i, rank in enumerate(self.ranks)}

    def logits(self, batch: RaggedBatch) -> list[Any]:
        runs = [self.threads.pool.submit(rank.rows, 0, batch) for rank in self.ranks]
        wait(runs)
        return [np.array(rows) for run in runs if (rows := run.result().logits) is not None]


def steps(groups: int, numbers: list[list[int]]) -> list[RaggedBatch]:
    """Steps of four sequences, with the number of the adapter of each sequence."""
    sequences = [Sequence([2 * i, 2 * i + 1], 32) for i in range(len(LENGTHS))]
    batches = []
    for step, adapters in enumerate(numbers):
        tokens = [
            [(7 * i + 31 * b + 5 * step) % VOCAB for i in range(length)]
            for b, length in enumerate(LENGTHS)
        ]
        batch = batch_of(sequences, tokens, [([], [])] * len(LENGTHS), False, groups)
        batches.append(batch._replace(adapters=ints(adapters)))
        for sequence, length in zip(sequences, LENGTHS, strict=True):
            sequence.computed += length
    return batches


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_give_the_bits_of_one_rank(family: str, mesh: Mesh, folder: Path) -> None:
    checkpoint = checkpoint_of(family, folder)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    kv = KvConfig((8,) * len(program.kv_groups), dtype="bf16")
    one = CpuExecutable(program, checkpoint.tensors, kv, 1, "")
    many = Ranks(mesh, program, checkpoint, kv)
    for adapter in (adapter_of(program, 0), low_rank_adapter(checkpoint), adapter_of(program, 1)):
        assert {one.add_adapter(adapter)} == many.add(adapter)
    bare = None
    for batch in steps(len(program.kv_groups), [[0, -1, 2, 1], [0, -1, 2, 1]]):
        want = one.run_variants(batch).logits
        assert want is not None
        want = want.copy()
        for logits in many.logits(batch):
            np.testing.assert_array_equal(logits, want)
        if bare is None:
            bare = one.run_variants(batch._replace(adapters=ints([-1] * 4))).logits
            assert bare is not None
            changed = (want != bare).any(axis=1)
            of_changed = np.isin(batch.seq_of, [0, 2, 3])
            assert (changed == of_changed).all(), "each adapter changes its own rows alone"
            one.run_variants(batch)
    many.threads.close()


def test_a_weight_that_no_rank_has_is_refused(folder: Path) -> None:
    checkpoint = checkpoint_of("qwen2", folder)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    many = Ranks(Mesh(1, 2), program, checkpoint, KvConfig((4,)))
    unknown = {"layers.7.mlp_norm": OwnWeight(added=np.ones(32, np.float32))}
    for rank in many.ranks:
        with pytest.raises(UnsupportedModelError, match=r"layers\.7\.mlp_norm, which the model"):
            rank.add_adapter(unknown)
    many.threads.close()
