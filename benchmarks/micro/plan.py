"""Overhead of a step beyond its roofline, for the default model and a tiny model.

The roofline is the sum over all ops of the min time for their bytes or operations, with the
bandwidth of the same round. Overhead is the rest of the wall time: the call from Python and its
return, the barriers between ops (timed as in roof.py), and the remainder in the kernels. The last
table has the cost of building a step's arrays.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
from harness import Bench, Column, Timed, main
from native import op_seconds, ragged
from roof import Barriers

from headrace import _native
from headrace.backend.cpu.executable import BLOCK_SIZE, CpuExecutable, compile
from headrace.batch import RaggedBatch
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import KvConfig
from headrace.engine.build import build_batch
from headrace.engine.scheduled import ScheduledSequence
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.planner.hardware import KINDS, Machine
from headrace.planner.host import cpu_name
from headrace.planner.roofline import step_seconds
from headrace.program.op import StepSize
from headrace.quant.formats import StoredTensor
from headrace.sampling_params import SamplingParams
from tests.tiny import tiny_engine, tiny_model

MODEL = "smollm2"
CONTEXT = 128
SEQUENCES = (1, 4, 16)
BUILT = (1, 16, 64)
BUILT_CONTEXT = 500
REPEATS = 31
KV_BYTES = 2  # bf16
STEP_COLUMNS = (
    Column("seqs", "seqs"),
    Column("wall_us", "step us", ",.0f"),
    Column("roofline_us", "roofline us", ",.0f"),
    Column("roofline_share", "of the step", ".0%"),
    Column("overhead_us", "overhead us", ",.0f"),
    Column("outside_us", "= outside ops us", ",.1f"),
    Column("barriers", "+ barriers"),
    Column("barrier_us", "their us", ",.1f"),
    Column("kernels_us", "+ kernels us", ",.0f"),
)
BUILD_COLUMNS = (
    Column("seqs", "seqs"),
    Column("microseconds", "us", ",.1f"),
    Column("each_us", "us a sequence", ",.2f"),
)


def plan(bench: Bench) -> None:
    """A table for each model, and one for building batches."""
    steps(bench, "tiny model", *tiny_model(0, context=256))
    if not bench.quick:
        checkpoint = open_checkpoint(resolve(MODEL))
        steps(bench, MODEL, checkpoint.spec, checkpoint.tensors)
    builds(bench)


def steps(bench: Bench, name: str, spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> None:
    """One table: decode steps by number of sequences."""
    blocks_each = CONTEXT // BLOCK_SIZE + 1
    kv = KvConfig((max(SEQUENCES) * blocks_each,))
    executable = compile(trace_model(spec, tensors), tensors, kv, bench.threads)
    tables = np.arange(kv.num_blocks[0], dtype=np.int32).reshape(max(SEQUENCES), blocks_each)
    executable.launch(
        ragged([(0, CONTEXT)] * max(SEQUENCES), tables, spec.vocab_size)
    )  # fills the context
    batches = {n: ragged([(CONTEXT, 1)] * n, tables[:n], spec.vocab_size) for n in SEQUENCES}
    rates = {kind: bench.rate(kind).run() for kind in KINDS}

    def roofline(seqs: int, bandwidth: float) -> float:
        machine = Machine(cpu_name(), _native.isa(), bench.threads, bandwidth, rates)
        return step_seconds(
            executable.program, StepSize(((CONTEXT, 1),) * seqs, seqs, KV_BYTES), machine
        )

    things = {
        "bandwidth": bench.bandwidth(),
        "barrier": bench.busy(Barriers(bench.threads, 1).seconds),
    }
    things |= {("wall", n): bench.busy(wall(executable, batch)) for n, batch in batches.items()}
    things |= {
        ("outside", n): bench.busy(outside(executable, batch)) for n, batch in batches.items()
    }
    rounds = bench.rounds(things)
    table = [
        {
            "seqs": n,
            "wall_us": rounds.spread(lambda s: s * 1e6, ("wall", n)),
            "roofline_us": rounds.spread(lambda b, n=n: roofline(n, b) * 1e6, "bandwidth"),
            "roofline_share": rounds.spread(
                lambda s, b, n=n: roofline(n, b) / s, ("wall", n), "bandwidth"
            ),
            "overhead_us": rounds.spread(
                lambda s, b, n=n: (s - roofline(n, b)) * 1e6, ("wall", n), "bandwidth"
            ),
            "outside_us": rounds.spread(lambda o: o * 1e6, ("outside", n)),
            "barriers": count,
            "barrier_us": rounds.spread(lambda one, count=count: one * count * 1e6, "barrier"),
            "kernels_us": rounds.spread(
                lambda s, b, o, one, n=n, count=count: (s - roofline(n, b) - o - one * count) * 1e6,
                *(("wall", n), "bandwidth", ("outside", n), "barrier"),
            ),
        }
        for n, count in ((n, num_barriers(executable, batch)) for n, batch in batches.items())
    ]
    executable.close()
    bench.table(
        "plan",
        f"decode steps of {name}, {CONTEXT} tokens of context",
        STEP_COLUMNS,
        table,
        model=name,
    )


def wall(executable: CpuExecutable, batch: RaggedBatch) -> Callable[[], float]:
    """Seconds of a step, called from Python."""

    def once() -> float:
        start = time.perf_counter()
        executable.launch(batch)
        return time.perf_counter() - start

    return lambda: statistics.median(once() for _ in range(REPEATS))


def outside(executable: CpuExecutable, batch: RaggedBatch) -> Callable[[], float]:
    """Seconds of a step before its first op and after its last: Python, checks, waking threads."""

    def once() -> float:
        start = time.perf_counter()
        inside = sum(op_seconds(executable.plan, [batch]).values())
        return time.perf_counter() - start - inside

    return lambda: statistics.median(once() for _ in range(REPEATS))


def num_barriers(executable: CpuExecutable, batch: RaggedBatch) -> int:
    """Barriers in a step."""
    executable.plan.set_profiling(True)
    executable.launch(batch)
    count: int = executable.plan.profile()[1]
    executable.plan.set_profiling(False)
    return count


def builds(bench: Bench) -> None:
    """One table: building the arrays of a decode step in Python."""
    things = {n: Timed(building(n), 1) for n in (BUILT[:2] if bench.quick else BUILT)}
    rounds = bench.rounds(things)
    table = [
        {
            "seqs": n,
            "microseconds": rounds.spread(lambda s: s * 1e6, n),
            "each_us": rounds.spread(lambda s, n=n: s * 1e6 / n, n),
        }
        for n in things
    ]
    bench.table(
        "build",
        f"building a RaggedBatch of decode rows, {BUILT_CONTEXT} tokens of context",
        BUILD_COLUMNS,
        table,
    )


def building(num_seqs: int) -> Callable[[], float]:
    """Seconds of build_batch() for sequences with one uncomputed prompt token."""
    engine = tiny_engine(
        tiny_model(0, context=1024), "cpu", slots=num_seqs * 512, max_num_seqs=num_seqs, threads=1
    )
    scheduled = []
    for _ in range(num_seqs):
        engine.add_request([1] * (BUILT_CONTEXT + 1), SamplingParams(max_tokens=2))
    for seq in engine._scheduler.waiting:
        seq.tables = engine._kv.new_tables()
        engine._kv.allocate(seq.tables, 0, BUILT_CONTEXT + 1)
        seq.computed = BUILT_CONTEXT
        scheduled.append(ScheduledSequence(seq, 1, True))

    def once() -> float:
        start = time.perf_counter()
        build_batch(scheduled, engine.limits.kv.block_size)
        return time.perf_counter() - start

    return lambda: statistics.median(once() for _ in range(REPEATS))


if __name__ == "__main__":
    main(__doc__, plan)
