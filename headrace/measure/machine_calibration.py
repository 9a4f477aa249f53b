"""Measures the speed of this machine's kernels, for `headrace plan`.

Random models of two shapes run steps of several sizes in each number format. Their times, op by op,
give the fixed times, the shares of the roofs, and the further work of each class of ops by least
squares. `Reach` explains each term.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from statistics import median
from typing import Any, NamedTuple

from headrace.backend import instructions
from headrace.backend_traits import KvDtype
from headrace.config import EngineConfig
from headrace.measure.adapter_time import ADAPTER_BITS, measure_adapter
from headrace.measure.engine_time import measure_engine
from headrace.measure.least_squares import fit_factors
from headrace.measure.op_profile import median_machine
from headrace.measure.phase_timer import PhaseTimer, Roof, step_blocks, step_phase
from headrace.measure.process_memory import measure_process
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.measure.random_model import random_checkpoint
from headrace.planner import hardware
from headrace.planner.calibration import Calibration
from headrace.planner.hardware import Machine
from headrace.planner.reach import (
    HostTime,
    OpClass,
    Reach,
    Reaches,
    class_of,
    is_product,
    rows_of_product,
    stored_bits,
    written_numbers,
)
from headrace.planner.roofline import op_kind
from headrace.program.kv import number_bytes
from headrace.program.op import Op, StepSize
from headrace.program.trace import Program

_BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16384,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "narrow": _BASE
    | {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 40,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "wide": _BASE
    | {
        "hidden_size": 1792,
        "intermediate_size": 5120,
        "num_hidden_layers": 4,
        "num_attention_heads": 28,
        "num_key_value_heads": 7,
    },
}
"""Sizes whose weights exceed caches: the columns of products differ by a factor of ten."""
_FORMATS = ("Q4_0", "Q4_K", "Q4_1", "Q6_K", "I8_ROW", "Q8_0", "BF16")
_DEPTH = 24
_SINGLE = ((_DEPTH, 1),)
_BATCHES = (17, 24, 32, 40, 64)
"""Sequences of steps whose products are bound by arithmetic, in blocks of different sizes."""
_PROMPTS = (128, 256)
_CONTEXTS: Sequence[tuple[tuple[int, int], ...]] = (
    ((1200, 1),),
    ((5000, 1),),
    ((1200, 1),) * 8,
    ((300, 1),) * 24,
    ((600, 4),) * 3,
    ((1000, 256),),
    ((3500, 128),),
)
"""Steps with context, for attention."""
_PASSES = 2
"""Runs of each model, with some time between them."""
_TURNS = 3
_SECONDS = 0.03
"""Minimum seconds of a step's measurements in a turn."""
_PRODUCT_OVERLAP = 6.0
"""Overlap of memory and arithmetic in products of a CPU."""
_CONTEXT_FORMATS = ("Q4_0", "BF16")
_SMALL_KV: Sequence[KvDtype] = ("int8", "int4")
"""Number formats of KV whose attention is measured next to that over bf16."""
_FULL_RATE = (1.0, 0.0, 0.0)
"""Least factors of arithmetic, unpacking and writing: no kernel is faster than the roof."""
_AVX512_ROWS, _OTHER_ROWS = 16, 4
"""Rows of a block (`kMaxRows` in `csrc/simd_*.h`)."""


class _Seen(NamedTuple):
    """Seconds of the ops of a class in a step, and the numbers that they depend on."""

    part: OpClass
    bits: float
    rows: int
    calls: float
    memory: float  # seconds by the bandwidth
    arithmetic: float  # seconds by the rate
    unpack: float  # seconds of a row for each block, by the rate
    written: float  # seconds of one operation on each written number
    seconds: float


def calibrate_machine(
    *, threads: int = 0, on_progress: ProgressCallback = ignore_progress
) -> Calibration:
    """Measure this machine's kernels, engine and process, in about two minutes.

    `threads` 0 uses all usable cores. Nothing is stored: see `store_calibration`.
    """
    runs = [_Model(name, format) for format in _FORMATS for name in _SHAPES]
    runs += [_Model(name, "Q4_0", kv_dtype) for kv_dtype in _SMALL_KV for name in _SHAPES]
    turns: dict[_Model, list[list[_Turn]]] = {}
    for number, run in enumerate(runs * _PASSES):
        on_progress("kernels", number / (len(runs) * _PASSES))
        measured = _measure(run, threads)
        known = turns.setdefault(run, [[] for _ in measured])
        for found, more in zip(known, measured, strict=True):
            found += more

    products: dict[tuple[str, bool], list[_Seen]] = defaultdict(list)
    others: dict[OpClass, list[_Seen]] = defaultdict(list)
    outside: list[tuple[int, float]] = []
    for model, steps in turns.items():
        # Other programs slow some turns, and make none faster.
        for turn in map(min, steps):
            classes = list(_account(turn))
            if model.kv_dtype in _SMALL_KV:
                others["attention"] += [seen for seen in classes if seen.part == "attention"]
                continue
            outside.append((len(turn.step.seqs), turn.outside))
            for seen in classes:
                if seen.part in ("linear", "qkv", "head"):
                    products[model.format, seen.part != "linear"].append(seen)
                else:
                    others[seen.part].append(seen)

    on_progress("engine", 0.0)
    table = _fit_table(products, others)
    table["adapter"] = {ADAPTER_BITS: measure_adapter(_SHAPES["narrow"], threads)}
    source = f"this machine, {date.today().isoformat()} (headrace calibrate --machine)"
    rows = _AVX512_ROWS if instructions("cpu").startswith("avx512") else _OTHER_ROWS
    launch, per_sequence = fit_factors(
        [[1.0, float(seqs)] for seqs, _ in outside], [seconds for _, seconds in outside]
    )
    host = HostTime(launch=launch, launch_per_sequence=per_sequence)
    return Calibration(
        Reaches(
            source=source,
            table=table,
            block_rows=rows,
            host=measure_engine(host, _SHAPES["narrow"], threads),
        ),
        measure_process(),
    )


class _Model(NamedTuple):
    """A random model: its shape, and the number formats of its weights and KV."""

    shape: str
    format: str
    kv_dtype: KvDtype = "bf16"


class _Turn(NamedTuple):
    """A step's seconds in a turn, as medians, and the machine around it."""

    wall: float
    outside: float
    """Seconds outside of all ops."""
    number: int
    ops: Mapping[str, float]
    step: StepSize
    program: Program
    machine: Machine


def _sizes(model: _Model) -> list[tuple[tuple[int, int], ...]]:
    """The steps that are measured, by sequence."""
    if model.kv_dtype in _SMALL_KV:
        return list(_CONTEXTS)
    sizes = [_SINGLE, *(_SINGLE * seqs for seqs in _BATCHES), *(((0, n),) for n in _PROMPTS)]
    return [*sizes, *(_CONTEXTS if model.format in _CONTEXT_FORMATS else ())]


def _measure(model: _Model, threads: int) -> list[list[_Turn]]:
    """Time the steps of a model turn by turn; returns the turns of each step."""
    checkpoint = random_checkpoint(model.shape, _SHAPES[model.shape], model.format)
    config = EngineConfig(backend="cpu", threads=threads, kv_dtype=model.kv_dtype)
    sizes = _sizes(model)
    steps = [StepSize(seqs, len(seqs), 2.0) for seqs in sizes]
    blocks = max(step_blocks(step, config.traits.kv_block_size) for step in steps)
    timer = PhaseTimer(model.shape, checkpoint, config, blocks)
    turns: list[list[_Turn]] = [[] for _ in steps]
    try:
        program = timer.executable.program
        kv_bytes = number_bytes(program.kv_groups, config.kv_format)
        machines, roof = [hardware.measure(threads)], Roof(threads)
        for number in range(_TURNS):
            for index, step in enumerate(steps):
                step = step._replace(kv_bytes=kv_bytes)
                times = [found for (found,) in timer.time_phase(step_phase(step), _SECONDS)]
                names = {name for found in times for name in found.ops}
                turns[index].append(
                    _Turn(
                        wall=median(found.wall for found in times),
                        outside=max(
                            0.0, median(found.wall - sum(found.ops.values()) for found in times)
                        ),
                        number=number,
                        ops={n: median(found.ops.get(n, 0.0) for found in times) for n in names},
                        step=step,
                        program=program,
                        machine=replace(machines[0], bandwidth=roof.around()),
                    )
                )
            machines.append(hardware.measure(threads))
    finally:
        timer.close()
    rates = median_machine(machines).rates
    return [
        [turn._replace(machine=replace(turn.machine, rates=rates)) for turn in found]
        for found in turns
    ]


def _account(turn: _Turn) -> Iterator[_Seen]:
    """Divide the seconds by op over the classes; ops that the backend adds count as `rows`."""
    program, step, seconds, machine = turn.program, turn.step, turn.ops, turn.machine
    by_class: dict[OpClass, list[Op]] = defaultdict(list)
    for op in program.ops:
        by_class[class_of(op)].append(op)
    names = {part: {op.name for op in ops} for part, ops in by_class.items()}
    known = set().union(*(found for part, found in names.items() if part != "rows"))
    for part, ops in by_class.items():
        chosen = set(seconds) - known if part == "rows" else names[part]
        yield _Seen(
            part=part,
            bits=stored_bits(ops[0], step),
            rows=step.logit_rows if part == "head" else step.rows,
            calls=len(ops),
            memory=sum(op.bytes(step) for op in ops) / machine.bandwidth,
            arithmetic=sum(op.flops(step) / machine.rates[op_kind(op, step)] for op in ops),
            unpack=sum(_unpack(op, step, machine) for op in ops),
            written=sum(written_numbers(op, step) for op in ops) / machine.rates["f32"],
            seconds=sum(seconds.get(name, 0.0) for name in chosen),
        )


def _unpack(op: Op, step: StepSize, machine: Machine) -> float:
    if not is_product(op):
        return 0.0
    rows = rows_of_product(op, step)
    block = _AVX512_ROWS if instructions("cpu").startswith("avx512") else _OTHER_ROWS
    return op.flops(step) / machine.rates[op_kind(op, step)] * -(-rows // block) / rows


def _fit_table(
    products: Mapping[tuple[str, bool], Sequence[_Seen]],
    others: Mapping[OpClass, Sequence[_Seen]],
) -> dict[OpClass, dict[float, Reach]]:
    table: dict[OpClass, dict[float, Reach]] = {
        "linear": {},
        "qkv": {},
        "attention": {},
        "rows": {},
    }
    formats = list(dict.fromkeys(format for format, _ in products))
    fixed, *shares = _fit_single(products, formats)
    for format, share in zip(formats, shares, strict=True):
        for offset, part in ((False, "linear"), (True, "qkv")):
            many = [seen for seen in products[format, offset] if seen.rows > _AVX512_ROWS]
            rate, unpack, written = fit_factors(
                [[s.arithmetic, s.unpack, s.written] for s in many],
                [max(0.0, s.seconds - s.calls * fixed) for s in many],
                _FULL_RATE,
            )
            bits = round(median(s.bits for s in many), 1)
            table[part][bits] = Reach(  # type: ignore[index]
                seconds=fixed,
                bandwidth=1 / share,
                rate=1 / rate,
                unpack=unpack / rate,
                written=written,
                overlap=_PRODUCT_OVERLAP,
            )
    table["head"] = table["qkv"]

    for bits in sorted({seen.bits for seen in others["attention"]}):
        table["attention"][round(bits, 1)] = _fit_attention(
            [seen for seen in others["attention"] if seen.bits == bits]
        )
    seen = others["rows"]
    fixed, written = fit_factors([[s.calls, s.written] for s in seen], [s.seconds for s in seen])
    table["rows"][32.0] = Reach(seconds=fixed, bandwidth=1.0, rate=1.0, written=written)
    return table


def _fit_attention(seen: Sequence[_Seen]) -> Reach:
    fixed, memory, rate, written = fit_factors(
        [[s.calls, s.memory, s.arithmetic, s.written] for s in seen],
        [s.seconds for s in seen],
        (0.0, 1.0, 1.0, 0.0),
    )
    return Reach(seconds=fixed, bandwidth=1 / memory, rate=1 / rate, written=written, overlap=1.0)


def _fit_single(
    products: Mapping[tuple[str, bool], Sequence[_Seen]], formats: Sequence[str]
) -> list[float]:
    """The fixed time of a product, and the bandwidths of each format, by steps of one row."""
    columns, seconds = [], []
    for (format, _), steps in products.items():
        for seen in steps:
            if seen.rows == 1:
                memory = [seen.memory if format == other else 0.0 for other in formats]
                columns.append([seen.calls, *memory])
                seconds.append(seen.seconds)
    # Caches serve at most a half of the weights.
    return fit_factors(columns, seconds, [0.0] + [0.5] * len(formats))
