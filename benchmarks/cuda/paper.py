"""Predicts the time of steps on an H100 from their launches and machine code, without a GPU.

    python benchmarks/cuda/paper.py              figures of `python benchmarks/cuda`
    python benchmarks/cuda/paper.py --kernels    each kernel of a step as well
    python benchmarks/cuda/paper.py --out FILE   compares with a result file and adds to it

Kernels are compiled, and their bytes, rounds and instructions counted. A launch takes a fixed time,
and the longest of three: its bytes from memory, its bytes from the L2 cache, and the rounds of its
loop. A round of the programs that share a multiprocessor takes their instructions, and then the
longest of their products on tensor cores, their bytes through shared memory, and the latency of one
round. Work of attention begins with three loads, one after the other.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from math import ceil, prod
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
sys.path.append(str(Path(__file__).resolve().parents[2]))

from costs import Context, arguments, label, launch_bytes, nbytes

from headrace.backend.cuda.architecture import H100
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.step_shape import StepShape, decoding, prefill
from headrace.backend_traits import KvDtype
from headrace.measure.table import print_table
from tests.backend.cuda import compiling

COPIED = 3.02e12
"""Bytes per second of copies, read and written: measured (`python benchmarks/cuda`)."""
CACHED = 7.3e12
"""Bytes per second from the L2 cache: measured (`checks.py --parts premises`)."""
MULTIPLIED = 800e12
"""Operations per second in bf16: measured, with cuBLAS at 2,048 rows (790 to 814)."""
_PER_CLOCK = 132 * 4096  # operations on tensor cores (NVIDIA's white paper)
CLOCK = 989.4e12 / _PER_CLOCK
"""Clocks per second in decoding, those of the data sheet: 1.83 GHz."""
LOADED_CLOCK = MULTIPLIED / _PER_CLOCK
"""Clocks per second while tensor cores are full and power limits them, if cuBLAS fills them."""
LAUNCH = 1.3e-6
"""Seconds of a kernel that does next to nothing, in a graph: measured (gather_rows)."""
RAMP = 2.1e-6
"""Seconds until the pipelines of a kernel are full and after they ran dry: measured, as the time of
the bf16 products beyond their bytes.
"""
LATENCY = 0.8e-6
"""Seconds of a load from memory."""
RANGES = 1.5e-6
"""Seconds in which the last program adds the sums of ranges of columns, from the cache."""
ISSUED = 0.725
"""Instructions per clock that a scheduler sustains. It is measured with `ROUND` by two int4
products of 8B: a round of the output product takes 1,235 clocks for 543 instructions of one warp,
and a round of the logits 4,384 for 2,825 of five warps.
"""
ROUND = 486
"""Clocks of a round that nothing overlaps: waits for loads, barriers and the last product."""
ATTENTION_ROUND = 692
"""The same for a tile of keys, whose products wait for each other: measured at 512 tokens."""
SHARED = 128
"""Bytes per clock from and to shared memory of a multiprocessor (NVIDIA's programming guide)."""
ITEM_LOADS = 3
"""Loads that an item of attention takes one after the other: itself, its table entry, its keys."""


@dataclass
class Cost:
    """What launches take: bytes of memory and cache, instruction slots, and predicted seconds."""

    launches: int = 0
    bytes: int = 0
    cache_bytes: int = 0
    slots: int = 0
    seconds: float = 0.0
    bound: str = ""

    def add(self, other: "Cost") -> None:
        for name in ("launches", "bytes", "cache_bytes", "slots", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bound = other.bound


@dataclass
class Model:
    """Compiled kernels by their launches."""

    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)

    def kernel(self, launch: Launch) -> dict[str, Any]:
        kind = compiling.kind_of(launch)
        if kind not in self.kernels:
            self.kernels[kind] = compiling.compile_launch(launch)
        return self.kernels[kind]

    def cost(self, launch: Launch, context: Context, rows: int) -> Cost:
        """What a launch takes in a step with a context before each of its rows."""
        moved, constants = launch_bytes(launch, context), launch.constants
        if launch.name == "linear_kernel":
            loop = _linear_loop(launch)
        elif launch.name == "attention_kernel":
            if rows > 1 and constants["ROWS"] == 16:  # for decoding rows alone
                return Cost(1, 0, 0, 0, LAUNCH, "launch")
            loop = _attention_loop(launch, context, rows)
        else:
            has_index = launch.name in ("norm_kernel", "attention_merge_kernel", "kv_write_kernel")
            took = LAUNCH + LATENCY * has_index + moved / COPIED
            return Cost(1, moved, 0, 0, took, "launch")
        kernel = self.kernel(launch)
        groups = groups_of(kernel, loop.programs)
        adds = constants.get("FINISHES") and context.tokens > constants["SPLIT"]
        chain = RANGES * bool(constants.get("PARALLEL") or adds)
        chain += ITEM_LOADS * LATENCY * loop.items * len(groups)
        cache = loop.loads * loop.rounds * loop.programs
        times = {
            "memory": moved / COPIED,
            "cache": (moved + cache) / CACHED,
            "rounds": loop.rounds * sum(_seconds_of_round(kernel, loop, n) for n in groups),
        }
        bound = max(times, key=lambda name: times[name])
        took = LAUNCH + RAMP + chain + times[bound]
        slots = int(loop.rounds * loop.programs * kernel["loop"]["instructions"] * kernel["warps"])
        return Cost(1, moved, int(cache), slots, took, bound)


@dataclass
class Loop:
    """The rounds of a kernel's loop, and what each takes."""

    programs: int
    rounds: float  # of a program
    products: int  # operations on tensor cores
    shared: int  # bytes to and from shared memory
    latency: int  # clocks
    clock: float
    loads: int = 0  # bytes of activations
    items: float = 0  # work of attention that a program takes, one after the other
    is_decoded: bool = True  # whether products wait for other instructions of the round


def groups_of(kernel: dict[str, Any], programs: int) -> list[int]:
    """Programs of the busiest multiprocessor: those that run together, group after group."""
    together = compiling.resident(kernel, H100, programs)
    full, rest = divmod(ceil(programs / H100.multiprocessors), together)
    return [together] * full + [rest] * (rest > 0)


def _seconds_of_round(kernel: dict[str, Any], loop: Loop, programs: int) -> float:
    """Seconds in which programs that run together end a round each. One overlaps the others."""
    issue = programs * kernel["warps"] / 4 * kernel["loop"]["instructions"] / ISSUED
    products = loop.products * H100.multiprocessors / MULTIPLIED * loop.clock
    others = max(products, loop.shared / SHARED)
    own = max(others, loop.latency) if loop.is_decoded else loop.latency
    return max(issue + own, programs * others) / loop.clock


def _linear_loop(launch: Launch) -> Loop:
    """A round loads codes and activations, and each warp group reads all of the activations."""
    constants, named = launch.constants, arguments(launch)
    weights, rows = compiling.loop_weights(launch), constants["BLOCK_M"]
    times, columns = ceil(named["M"] / rows), weights // constants["BLOCK_N"]
    codes = nbytes(named["codes"]) * weights // (named["num_rows"] * named["K"])
    activations = 2 * rows * columns
    return Loop(
        programs=prod(launch.grid),
        rounds=times * named["num_rows"] * named["K"] / weights / prod(launch.grid),
        products=2 * rows * weights,
        shared=2 * codes + activations * (1 + constants["BLOCK_N"] // 64),
        latency=ROUND,
        clock=LOADED_CLOCK if rows >= 128 else CLOCK,
        loads=activations,
        is_decoded=bool(constants["FORMAT"].scale),
    )


def _attention_loop(launch: Launch, context: Context, rows: int) -> Loop:
    """Tiles of keys that a program takes, the programs that have work, and their items.

    A chunk's rows see half of the chunk on average, before which there is no context.
    """
    constants = launch.constants
    units = constants["KV_HEADS"] * constants["HEAD_TILES"]
    queries, keys = 1, context.tokens
    if rows > 1 and context.tokens <= rows:
        queries = ceil(rows / (constants["ROWS"] // constants["TILE_HEADS"]))
        keys = max(constants["KEYS"], context.tokens // 2)
    items = units * queries * ceil(keys / constants["SPLIT"])
    programs = min(launch.grid[0], items)
    tile = constants["ROWS"] * constants["KEYS"]
    return Loop(
        programs=programs,
        rounds=units * queries * keys / constants["KEYS"] / programs,
        products=2 * tile * (constants["KEY_COLS"] + constants["VALUE_COLS"]),
        shared=0,
        latency=ATTENTION_ROUND,
        clock=CLOCK,
        items=ceil(items / programs),
    )


def step(
    model: Model, executable: CudaExecutable, shape: StepShape, context: Context, rows: int
) -> dict[str, Cost]:
    """The launches of a step by work, the longest first."""
    found = defaultdict[str, Cost](Cost)
    plan = executable._plan(shape)
    for launch, op in zip(plan.launches, plan.names, strict=True):
        found[label(launch, op)].add(model.cost(launch, context, rows))
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


FORMATS = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
CONTEXT, CHUNK, LONG = 512, 2048, 32_768


def predictions() -> tuple[dict[str, float], dict[str, dict[str, Cost]]]:
    """Predicted figures by name, and what each kernel of their steps takes."""
    compiling.pretend(H100)
    model, figures, steps = Model(), dict[str, float](), dict[str, dict[str, Cost]]()
    for number, form in FORMATS.items():
        executable = compiling.executable_of(compiling.Case("8b", form), layers=32)
        spec, one = executable.program, context_of(executable, CONTEXT)
        costs = step(model, executable, decoding(1), one, 1)
        read = sum(
            {
                w.name: w.nbytes for op in spec.ops for w in op.matrices() if op.name != "embed"
            }.values()
        )
        read += 32 * CONTEXT * one.token_bytes
        took = seconds_of(costs)
        figures[f"8b {number}: share of copy bandwidth at one row"] = read / took / COPIED
        figures[f"8b {number}: step of one row"] = 1e3 * took
        steps[f"8b {number}, one row"] = costs
        chunk = step(model, executable, prefill(CHUNK, 1), context_of(executable, CHUNK), CHUNK)
        layer = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14_336
        operations = 2 * 32 * (CHUNK * layer + CHUNK * CHUNK * 32 * 128)
        figures[f"8b {number}: prefill of {CHUNK} rows"] = 1e-12 * operations / seconds_of(chunk)
        steps[f"8b {number}, {CHUNK} rows"] = chunk
    kinds: tuple[KvDtype, ...] = ("bf16", "fp8", "int8")
    for kind in kinds:
        executable = compiling.executable_of(compiling.Case("8b", "Q4_0", kind))
        context = context_of(executable, LONG)
        costs = step(model, executable, decoding(1), context, 1)
        ours = {name: cost for name, cost in costs.items() if name.startswith("attention")}
        read = 2 * LONG * context.token_bytes
        name = f"KV in {kind}: 1 x {LONG} tokens"
        figures[name] = read / seconds_of(ours) / COPIED
        steps[name] = ours
    return figures, steps


def context_of(executable: CudaExecutable, tokens: int) -> Context:
    (store,) = executable._stores
    size = store.bytes // (store.keys.shape[1] * store.block_size * len(store.group.layers))
    return Context(tokens, size)


def seconds_of(costs: dict[str, Cost]) -> float:
    return sum(cost.seconds for cost in costs.values())


def main() -> None:
    """Print the predictions beside what was measured, with their errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", action="store_true", help="each kernel of a step as well")
    parser.add_argument("--out", type=Path, help="result file to compare with and to write to")
    args = parser.parse_args()
    known = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    measured = {figure["name"]: figure for figure in known.get("figures", [])}
    figures, steps = predictions()
    rows = []
    for name, value in figures.items():
        found = measured[name]["value"] if name in measured else None
        error = "" if found is None else f"{value / found - 1:+.0%}"
        rows.append([name, f"{value:.3g}", "" if found is None else f"{found:.3g}", error])
    print_table(["figure", "predicted", "measured", "error"], rows)
    if args.kernels:
        took = {
            (figure["name"].partition(":")[0], each["kernel"]): each["ms"]
            for figure in measured.values()
            for each in figure["more"].get("kernels", [])
            if "one row" in figure["name"]
        }
        for name, costs in steps.items():
            print(f"\n{name}: {sum(cost.launches for cost in costs.values())} launches")
            print_table(
                ["kernel", "launches", "MB", "L2 MB", "M slots", "us each", "measured", "bound by"],
                [
                    row_of(each, cost, took.get((name.partition(",")[0], each)))
                    for each, cost in costs.items()
                ],
            )
    if args.out:
        known["paper"] = figures
        args.out.write_text(json.dumps(known, indent=1) + "\n")


def row_of(name: str, cost: Cost, ms: float | None) -> list[str]:
    each = 1e6 * cost.seconds / cost.launches
    found = "" if ms is None else f"{1e3 * ms / cost.launches:.1f}"
    sizes = (1e-6 * cost.bytes, 1e-6 * cost.cache_bytes, 1e-6 * cost.slots)
    return [
        name,
        str(cost.launches),
        *(f"{size:.1f}" for size in sizes),
        f"{each:.1f}",
        found,
        cost.bound,
    ]


if __name__ == "__main__":
    main()
