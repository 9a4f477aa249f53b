"""Ranks of the GPU backend as threads: the bits of one rank, and the predicted bytes of exchanges.

The gate tries a few families, `make test-triton` all of them.
"""

import os

import numpy as np
import pytest
import torch

from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.stream import HostStream
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.parallel.mesh import Mesh
from tests.backend.cuda.rank_threads import RankThreads
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
    for batch in steps(BLOCK_SIZE, groups):
        expected = one.launch(batch, logits=True).wait().logits
        np.testing.assert_array_equal(many.run(batch).logits, expected)
    many.close()
