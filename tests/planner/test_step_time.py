"""Predicted steps next to the measured ones of an H100 (benchmarks/cuda/results)."""

import json
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from headrace.backend import lower_program
from headrace.checkpoint.dummy import dummy_tensors
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.planner.machine_files import read_machine
from headrace.planner.roofline import op_kind, step_seconds
from headrace.planner.step_time import Link, StepTimer, known_reaches
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize, Value
from headrace.program.ops import Attention
from headrace.program.trace import Program
from headrace.quant.formats import FORMATS
from tests.planner.models import LLAMA_8B

RESULTS = Path(__file__).parents[2] / "benchmarks/cuda/results/NVIDIA-H100-80GB-HBM3.json"
H100 = read_machine("h100-sxm").machine()


@cache
def program_of(spec: ModelSpec, format: str, backend: str = "cuda") -> Program:
    tensors = dummy_tensors(spec, FORMATS[format])
    return lower_program(backend, trace_model(spec, tensors), tensors)


def timer_of(spec: ModelSpec, format: str, link: Link | None = None) -> StepTimer:
    reaches = known_reaches("cuda")
    assert reaches
    return StepTimer([program_of(spec, format)], H100, reaches, link)


def step(program: Program, depth: int, seqs: int, rows: int = 1) -> StepSize:
    kv_bytes = number_bytes(program.kv_groups, "bf16")
    return StepSize(((depth, rows),) * seqs, seqs, kv_bytes)


@pytest.mark.parametrize("name, format", [("bf16", "BF16"), ("int8", "Q8_0"), ("int4", "Q4_0")])
def test_measured_steps_of_an_h100(name: str, format: str) -> None:
    figures = {
        figure["name"]: figure["value"] for figure in json.loads(RESULTS.read_text())["figures"]
    }
    program, timer = program_of(LLAMA_8B, format), timer_of(LLAMA_8B, format)
    for size, seqs in (("one row", 1), ("16 rows", 16)):
        measured = figures[f"8b {name}: step of {size}"] * 1e-3
        predicted = timer.seconds(step(program, 512, seqs))
        assert predicted == pytest.approx(measured, rel=0.05), size


@pytest.mark.parametrize("format", ["BF16", "Q8_0", "Q4_0", "F32"])
@pytest.mark.parametrize("depth, seqs, rows", [(0, 1, 1), (4096, 1, 1), (512, 64, 1), (0, 1, 2048)])
def test_no_step_is_faster_than_its_roofs(format: str, depth: int, seqs: int, rows: int) -> None:
    program, timer = program_of(LLAMA_8B, format), timer_of(LLAMA_8B, format)
    size = step(program, depth, seqs, rows)
    parts = timer.class_times(size)
    assert sum(part.calls for part in parts) == len(program.ops)
    assert all(
        part.seconds == pytest.approx(part.launch + part.memory + part.arithmetic + part.link)
        for part in parts
    )
    assert timer.seconds(size) > step_seconds(program, size, H100)


def test_a_prompt_is_bound_by_arithmetic_and_a_token_by_memory() -> None:
    program, timer = program_of(LLAMA_8B, "BF16"), timer_of(LLAMA_8B, "BF16")
    first = timer.class_times(step(program, 0, 1, 2048))[0]
    token = timer.class_times(step(program, 2048, 1))[0]
    assert (first.part, first.bound) == ("linear", "arithmetic")
    assert (token.part, token.bound) == ("linear", "memory")


def test_links_count_only_between_ranks() -> None:
    size = step(program_of(LLAMA_8B, "BF16"), 512, 1)
    alone = timer_of(LLAMA_8B, "BF16").seconds(size)
    assert timer_of(LLAMA_8B, "BF16", Link(1e9, 1e-3)).seconds(size) == alone


def test_costs_are_those_of_each_op() -> None:
    """Ops that are counted together cost as much as one by one, in any order of steps."""
    reaches = known_reaches("cuda")
    assert reaches
    program, timer = program_of(LLAMA_8B, "Q4_0"), timer_of(LLAMA_8B, "Q4_0")
    for seqs, logit_rows in ((((7, 1), (900, 1)), 2), (((7, 2), (0, 500)), 3), (((7, 9),), 0)):
        size = StepSize(seqs, logit_rows, 2.0)
        seconds = 0.0
        for op in program.ops:
            out, reach = op.output(), reaches.of(op, size)
            if out and not out.num_rows(size):
                continue
            memory = op.bytes(size) / (H100.bandwidth * reach.bandwidth)
            arithmetic = op.flops(size) / (H100.rates[op_kind(op, size)] * reach.rate)
            seconds += reach.seconds + max(memory, arithmetic)
        assert timer.seconds(size) == pytest.approx(seconds, rel=1e-9)
        assert timer.seconds(size) == timer.seconds(size)


@pytest.mark.parametrize("window, sinks", [(0, 0), (1, 0), (9, 0), (9, 4), (4, 9)])
def test_attention_counts_the_positions_that_rows_see(window: int, sinks: int) -> None:
    value = Value(0, 1, "step")
    op = Attention(
        out=value,
        q=value,
        layer=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        value_dim=1,
        scale=1.0,
        window=window,
        num_sink_tokens=sinks,
    )

    def seen(position: int) -> set[int]:
        first = max(0, position + 1 - window) if window else 0
        return {*range(first, position + 1), *range(min(sinks, position + 1))}

    for context, rows in product(range(20), range(1, 20)):
        each = [seen(context + row) for row in range(rows)]
        size = StepSize(((context, rows),), 0, 1.0)
        assert op.flops(size) == 4 * sum(map(len, each))
        assert op.bytes(size) == 2 * len(set().union(*each))
