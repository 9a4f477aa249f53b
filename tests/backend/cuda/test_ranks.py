"""Ranks of the GPU backend as threads: the bits of one rank, and the predicted bytes of exchanges.

The gate tries a few families, `make test-triton` all of them.
"""

import os
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from headrace.backend.cuda.architecture import architecture
from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.kernels.linear import linear
from headrace.backend.cuda.kernels.tiles import splits_for
from headrace.backend.cuda.layout import layout_of
from headrace.backend.cuda.stream import HostStream
from headrace.backend.cuda.weights import Weights
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.parallel.mesh import Mesh
from headrace.parallel.tensor import slice_tensor, slice_weight
from headrace.program.op import Weight
from tests.backend.cuda.rank_threads import RankThreads
from tests.backend.stored import random_stored
from tests.family_configs import CONFIGS, spec_of
from tests.parallel.models import steps
from tests.tiny import random_tensors

IS_LONG = "HEADRACE_TRITON_EXAMPLES" in os.environ
BLOCK_SIZE = 8
MESHES = [Mesh(2, 1), Mesh(2, 2, sequence=True)]
FEW = [("llama3-gqa", Mesh(2, 1)), ("mixtral", Mesh(2, 2, sequence=True))]
ALL = [(name, mesh) for name in CONFIGS for mesh in MESHES] + [
    ("llama3-gqa", Mesh(1, 3)),
    ("llama-mqa", Mesh(4, 1)),
    ("mixtral", Mesh(2, 1, shares_experts=False)),
    ("deepseek-v2", Mesh(3, 1)),
]


@pytest.mark.parametrize(("name", "mesh"), ALL if IS_LONG else FEW)
def test_ranks_give_the_bits_of_one_rank(name: str, mesh: Mesh) -> None:
    spec = spec_of(name)
    tensors = random_tensors(spec, 1)
    program = trace_model(spec, tensors)
    groups = len(program.kv_groups)
    kv = KvConfig((4,) * groups, BLOCK_SIZE, "bf16")
    one = CudaExecutable(program, tensors, kv, torch.bfloat16, HostStream())
    many = RankThreads(mesh, program, tensors, kv)
    for batch in islice(steps(BLOCK_SIZE, groups), 4 if IS_LONG else 2):
        expected = one.launch(batch, logits=True).wait().logits
        np.testing.assert_array_equal(many.run(batch).logits, expected)
    many.close()


def test_a_share_of_a_weight_adds_the_ranges_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranges of columns of half of the rows would be shorter, and their sum another."""
    gpu = architecture()._replace(multiprocessors=8)
    monkeypatch.setattr("headrace.backend.cuda.architecture._current", gpu)
    rows, cols = 256, 2048
    tensors = {"w": random_stored("Q8_0", rows, cols, seed=1, name="w", scale=0.02)}
    whole = Weight("w", rows, cols, 0)
    halves = [slice_weight(whole, (first, first + rows // 2)) for first in (0, rows // 2)]
    tensors |= {half.name: slice_tensor(tensors, half) for half in halves}
    x = torch.randn(1, cols, generator=torch.Generator().manual_seed(0))
    x = x.to(DEVICE, torch.bfloat16)

    def product(weight: Weight) -> torch.Tensor:
        out = torch.zeros(1, weight.rows, device=DEVICE)
        linear(out, x, Weights(tensors).matrix(weight), activations=torch.bfloat16)()
        return out

    layout = layout_of(tensors["w"])
    whole_ranges, ranges = (
        splits_for(count, cols, layout, torch.bfloat16) for count in (rows, rows // 2)
    )
    assert whole_ranges != ranges
    assert torch.equal(torch.cat([product(half) for half in halves], 1), product(whole))
    alone = product(replace(halves[0], whole_rows=0))
    assert not torch.equal(alone, product(halves[0]))
