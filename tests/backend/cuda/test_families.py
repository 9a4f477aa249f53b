"""Every model family on the GPU backend: logits of a prompt, of decoding and of a draft
tree equal the reference.
"""

import numpy as np
import pytest

from headrace.backend import compile_program, forward
from headrace.backend.cuda.lowering import LOWER
from headrace.backend.reference.ops import RUN
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.program import collective
from headrace.program.op import Op
from tests.backend.batches import Sequence, batch_of
from tests.family_configs import CONFIGS, spec_of
from tests.tiny import random_tensors

PROMPT = [11, 7, 93, 40, 5, 66, 21, 8, 90, 17, 3]
TREE = [4, 9, 4], [-1, -1, 0]


def test_every_op_has_a_kernel() -> None:
    """Ops of ranks need no reference; abstract classes of ops are not lowered."""
    of_ranks = {
        op
        for op in vars(collective).values()
        if isinstance(op, type) and issubclass(op, Op) and op.__module__ == collective.__name__
    }
    assert set(LOWER) == set(RUN) | (of_ranks - {collective.Collective})


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_reference(name: str) -> None:
    spec = spec_of(name)
    tensors = random_tensors(spec, 1)
    program = trace_model(spec, tensors)
    kv = KvConfig((4,) * len(program.kv_groups), 8, "f32")
    ours, truth = (
        compile_program(backend, program, tensors, kv, 1, "f32")
        for backend in ("cuda", "reference")
    )
    sequence = Sequence([2, 0, 3], 8)
    for part, draft in ((PROMPT, ([], [])), ([30], TREE)):
        batch = batch_of([sequence], [part], [draft], bool(draft[0]), len(program.kv_groups))
        got, want = forward(ours, batch).logits, forward(truth, batch).logits
        assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
        sequence.computed += len(part)
