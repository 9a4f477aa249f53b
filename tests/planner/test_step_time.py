"""Predicted steps next to the measured ones of an H100 (benchmarks/cuda/results)."""

import json
from pathlib import Path

import pytest

from headrace.backend import lower_program
from headrace.checkpoint.dummy import dummy_tensors
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.planner.machine_files import read_machine
from headrace.planner.roofline import step_seconds
from headrace.planner.step_time import Link, class_times, known_reaches, step_time
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize
from headrace.program.trace import Program
from headrace.quant.formats import FORMATS
from tests.planner.models import LLAMA_8B

RESULTS = Path(__file__).parents[2] / "benchmarks/cuda/results/NVIDIA-H100-80GB-HBM3.json"
H100 = read_machine("h100-sxm").machine()


def program_of(spec: ModelSpec, format: str, backend: str = "cuda") -> Program:
    tensors = dummy_tensors(spec, FORMATS[format])
    return lower_program(backend, trace_model(spec, tensors), tensors)


def step(program: Program, depth: int, seqs: int, rows: int = 1) -> StepSize:
    kv_bytes = number_bytes(program.kv_groups, "bf16")
    return StepSize(((depth, rows),) * seqs, seqs, kv_bytes)


@pytest.mark.parametrize("name, format", [("bf16", "BF16"), ("int8", "Q8_0"), ("int4", "Q4_0")])
def test_measured_steps_of_an_h100(name: str, format: str) -> None:
    figures = {
        figure["name"]: figure["value"] for figure in json.loads(RESULTS.read_text())["figures"]
    }
    program, reaches = program_of(LLAMA_8B, format), known_reaches("cuda")
    assert reaches
    for size, seqs in (("one row", 1), ("16 rows", 16)):
        measured = figures[f"8b {name}: step of {size}"] * 1e-3
        predicted = step_time(program, step(program, 512, seqs), H100, reaches)
        assert predicted == pytest.approx(measured, rel=0.05), size


@pytest.mark.parametrize("format", ["BF16", "Q8_0", "Q4_0", "F32"])
@pytest.mark.parametrize("depth, seqs, rows", [(0, 1, 1), (4096, 1, 1), (512, 64, 1), (0, 1, 2048)])
def test_no_step_is_faster_than_its_roofs(format: str, depth: int, seqs: int, rows: int) -> None:
    program, reaches = program_of(LLAMA_8B, format), known_reaches("cuda")
    assert reaches
    size = step(program, depth, seqs, rows)
    parts = class_times(program, size, H100, reaches)
    assert sum(part.calls for part in parts) == len(program.ops)
    assert all(
        part.seconds == pytest.approx(part.launch + part.memory + part.arithmetic + part.link)
        for part in parts
    )
    assert step_time(program, size, H100, reaches) > step_seconds(program, size, H100)


def test_a_prompt_is_bound_by_arithmetic_and_a_token_by_memory() -> None:
    program, reaches = program_of(LLAMA_8B, "BF16"), known_reaches("cuda")
    assert reaches
    first = class_times(program, step(program, 0, 1, 2048), H100, reaches)[0]
    token = class_times(program, step(program, 2048, 1), H100, reaches)[0]
    assert (first.part, first.bound) == ("linear", "arithmetic")
    assert (token.part, token.bound) == ("linear", "memory")


def test_links_count_only_between_ranks() -> None:
    program, reaches = program_of(LLAMA_8B, "BF16"), known_reaches("cuda")
    assert reaches
    size = step(program, 512, 1)
    alone = step_time(program, size, H100, reaches)
    assert step_time(program, size, H100, reaches, Link(1e9, 1e-3)) == alone
