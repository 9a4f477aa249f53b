"""The tables of ops agree: the tracer, the reference backend, the cpu backend and the collectives.

tests/backend/cuda/test_families.py does the same for the cuda backend.
"""

from types import ModuleType

from headrace.backend.cpu.lowering import LOWER
from headrace.backend.reference.ops import RUN
from headrace.program import collective, moe, ops
from headrace.program.op import Op
from headrace.program.trace import Tracer
from tests.parallel import lockstep

FUSED = {ops.LinearActivate, ops.LinearAdd, ops.QkvRopeWrite, ops.GluLinear}
"""Ops that `fuse` makes of others, so a model cannot trace them."""
REWRITTEN = {ops.Threshold}
"""Ops that `program/sparsity.py` adds to a traced program."""


def ops_of(*modules: ModuleType) -> set[type[Op]]:
    return {
        op
        for module in modules
        for op in vars(module).values()
        if isinstance(op, type) and issubclass(op, Op) and op.__module__ == module.__name__
    }


OPS = ops_of(ops, moe)
RANK_OPS = ops_of(collective) - {collective.Collective}


def test_the_tracer_has_a_method_for_every_op_but_fused_ones() -> None:
    names = {object.__new__(op).name for op in OPS - FUSED - REWRITTEN}
    methods = {name for name in vars(Tracer) if not name.startswith("_")}
    assert methods - names == {"has", "weight", "vector"}
    assert names <= methods


def test_the_reference_backend_runs_every_op() -> None:
    assert set(RUN) == OPS


def test_the_cpu_backend_lowers_every_op() -> None:
    assert set(LOWER) == OPS | RANK_OPS


def test_ranks_in_lock_step_run_every_op_between_ranks() -> None:
    moved = {collective.Send, collective.Receive}
    own = {*lockstep.LOCAL_OPS, *lockstep.COLLECTIVE_OPS} - {ops.Attention}
    assert own == RANK_OPS - moved
