"""Seconds of a step that a low-rank adapter adds, for the plan of this machine."""

from collections.abc import Mapping
from math import inf
from typing import Any

import numpy as np

from headrace.backend.cpu.memory import low_rank_bytes
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.measure.least_squares import fit_factors
from headrace.measure.op_profile import Phase
from headrace.measure.phase_timer import PhaseTimer, step_blocks, step_phase
from headrace.measure.random_model import random_checkpoint
from headrace.model import linear_weights, tensor_shapes
from headrace.model.spec import ModelSpec
from headrace.planner import hardware
from headrace.planner.adapter_costs import LowRankProducts, with_low_rank
from headrace.planner.reach import Reach, written_numbers
from headrace.program.adapter import LowRank
from headrace.program.op import Op, StepSize

ADAPTER_BITS = 16.0
"""Bits of a number of the matrices."""
_RANKS = (8, 32, 64)
_STEPS = (((24, 1),), ((24, 1),) * 4, ((24, 1),) * 16, ((24, 1),) * 40, ((0, 128),))
_TURNS = 4
_SECONDS = 0.02
_LEAST = (0.0, 0.5, 1.0, 0.0)
"""Caches serve at most a half of the matrices, and no kernel is faster than the roof."""


def measure_adapter(config: Mapping[str, Any], threads: int) -> Reach:
    """Speed of the products of an adapter with matrices for all linear weights of a random model.

    Steps with the adapter and without it take turns.
    """
    checkpoint = random_checkpoint("adapter", config, "Q4_0")
    engine = EngineConfig(backend="cpu", threads=threads)
    sizes = [StepSize(seqs, len(seqs), 2.0) for seqs in _STEPS]
    blocks = max(step_blocks(step, engine.traits.kv_block_size) for step in sizes)
    timer = PhaseTimer("adapter", checkpoint, engine, blocks)
    columns, seconds = [], []
    try:
        machine, program = hardware.measure(threads), timer.executable.program
        for rank in _RANKS:
            matrices = random_low_rank(checkpoint, rank)
            timer.adapter = timer.executable.add_adapter(matrices)
            planned = with_low_rank(program, matrices, low_rank_bytes, "f32")
            ops: list[Op] = [op for op in planned.ops if isinstance(op, LowRankProducts)]
            for step in sizes:
                columns.append(
                    [
                        float(len(ops)),
                        sum(op.bytes(step) for op in ops) / machine.bandwidth,
                        sum(op.flops(step) for op in ops) / machine.rates["f32"],
                        sum(written_numbers(op, step) for op in ops) / machine.rates["f32"],
                    ]
                )
                seconds.append(_added(timer, step))
            timer.executable.remove_adapter(timer.adapter)
    finally:
        timer.close()
    fixed, memory, rate, written = fit_factors(columns, seconds, _LEAST)
    return Reach(seconds=fixed, bandwidth=1 / memory, rate=1 / rate, written=written, overlap=1.0)


def _added(timer: PhaseTimer, step: StepSize) -> float:
    """Seconds that the timer's adapter adds to a step. Other programs slow some turns, and make
    none faster.
    """
    phase, number = step_phase(step), timer.adapter
    with_adapter, without = inf, inf
    for _ in range(_TURNS):
        timer.adapter = number
        with_adapter = min(with_adapter, _seconds(timer, phase))
        timer.adapter = None
        without = min(without, _seconds(timer, phase))
    timer.adapter = number
    return with_adapter - without


def _seconds(timer: PhaseTimer, phase: Phase) -> float:
    return min(times.wall for (times,) in timer.time_phase(phase, _SECONDS))


def random_low_rank(checkpoint: Checkpoint, rank: int) -> dict[str, LowRank]:
    """Random matrices for all linear weights but the head."""
    spec: ModelSpec = checkpoint.spec
    rng, shapes = np.random.default_rng(0), tensor_shapes(spec)
    found = {}
    for name in sorted(linear_weights(spec) & checkpoint.tensors.keys() - {"head", "embed"}):
        rows, cols = shapes[name]
        down = rng.standard_normal((rank, cols), np.float32)
        found[name] = LowRank(down, rng.standard_normal((rows, rank), np.float32), 0.01)
    return found
