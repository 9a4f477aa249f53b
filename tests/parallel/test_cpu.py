"""Ranks on the cpu backend have the bits of one rank, fused or op by op; what they exchange is as much as is said."""

from pathlib import Path

import numpy as np
import pytest

from headrace.backend.cpu import CpuExecutable, lower, sized
from headrace.checkpoint.load import open_checkpoint
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.parallel.mesh import Mesh
from headrace.program.collective import Collective
from headrace.program.op import Load
from tests.backend.batches import Sequence, batch_of
from tests.families import VARIANTS, save_model
from tests.parallel.threads import Threads


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_bits_of_one_rank(name: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    save_model(name, tmp_path / name)
    checkpoint = open_checkpoint(tmp_path / name)
    program, mesh = trace_model(checkpoint.spec, checkpoint.tensors), Mesh(tensor, pipeline)
    groups = len(program.kv_groups)
    kv = KvConfig((4,) * groups)
    for fused in (True, False):
        one = CpuExecutable(program, checkpoint.tensors, kv, 1, "", lower=lower if fused else sized)
        many = Threads(mesh, program, checkpoint.tensors, kv, fused)
        sequences = [Sequence([1, 3], 32), Sequence([2, 0], 32)]
        for chunk in (5, 3, 1):
            tokens = [[(7 * i + 31 * b + chunk) % 101 for i in range(chunk)] for b in range(2)]
            batch = batch_of(sequences, tokens, [([], [])] * 2, False, groups)
            one.run(batch, batch.tokens)
            before = [carrier.received for carrier in many.carriers]
            found = many.logits(batch)
            assert len(found) == tensor
            for logits in found:
                np.testing.assert_array_equal(logits, one.logits(batch))
            load = Load(tuple((s.computed, chunk) for s in sequences), len(batch.logit_rows), 0)
            for carrier, rank, had in zip(many.carriers, many.ranks, before, strict=True):
                said = sum(op.link_bytes(load) for op in rank.program.ops if isinstance(op, Collective))
                assert carrier.received - had == said
            for sequence in sequences:
                sequence.computed += chunk
        many.close()
