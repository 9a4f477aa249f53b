"""Kernels of whole programs compile for each kind of GPU on any machine, within its memory and
registers, to the expected instructions.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.backend.cuda.examples import examples
from tests.backend.cuda.tensor_cores import cores_of

ROOT = Path(__file__).parents[3]
STACKS = {"rope_angles_kernel": 64}
"""Stack bytes per thread: sines of large numbers need some."""
ATTENTION_STACK = 512
"""Stack bytes for attention outside its loop over keys: what a program loads and stores once."""
FEW_BYTES = 16
ON_ALL_CHIPS = ["8b-BF16", "8b-Q8_0-int8", "8b-Q4_0-fp8", "1b-e4m3"]

Kernel = dict[str, Any]


@cache
def kernels() -> list[Kernel]:
    """Kernels of a few programs, or of all in `make test-triton`."""
    if examples(1) == 1:
        few = ["8b-Q8_0-int8", "--rows", "1", "64", "--kernel", "linear"]
        return [*compiled(), *compiled(*few, *on("sm_89", "sm_90"))]
    others = compiled(*ON_ALL_CHIPS, *on("sm_80", "sm_89", "sm_100", "sm_120"))
    without_ptx = compiled("8b-BF16", "8b-Q8_0-int8", "--rows", "1", "64", *on("gfx942"))
    return [*compiled("--all"), *others, *without_ptx]


def on(*chips: str) -> list[str]:
    return ["--chips", *chips]


def compiled(*words: str, program: str = "compiling") -> list[Kernel]:
    """Kernels that a process without the interpreter compiles."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(ROOT / "build/triton"),
        "PYTHONPATH": path,
    }
    command = [sys.executable, "-m", f"tests.backend.cuda.{program}", *words]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert not result.returncode, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def name_of(kernel: Kernel) -> str:
    where = f"{kernel['chip']}, {kernel['case']}, {kernel['rows']} rows"
    return f"{where}: {kernel['kernel']} {kernel['constants']}"


def multiplies(kernel: Kernel) -> bool:
    """Whether the kernel multiplies on tensor cores, by instructions that have names here."""
    weight = kernel["weight"] if kernel["chip"] not in ("sm_100", "gfx942") else ""
    is_bf16 = "compute='bf16'" in weight
    return bool(weight) and (is_bf16 or "family='int8" in weight)


def test_all_kernels_compile() -> None:
    failed = {name_of(kernel): kernel["error"] for kernel in kernels() if "error" in kernel}
    assert not failed, "\n".join(f"{name}\n{error}" for name, error in failed.items())
    assert {"linear_kernel", "attention_kernel", "kv_write_kernel", "sample_chunk_kernel"} <= {
        kernel["kernel"] for kernel in kernels()
    }


def test_kernels_fit_in_shared_memory() -> None:
    assert not {
        name_of(kernel): kernel["shared"]
        for kernel in kernels()
        if "error" not in kernel and kernel["shared"] > kernel["shared_limit"]
    }


def test_kernels_fit_in_the_registers_of_an_h100() -> None:
    """Spilled registers lie in the stack."""
    assert not {
        name_of(kernel): kernel["stack"]
        for kernel in kernels()
        if "error" not in kernel
        and kernel["chip"] == "sm_90"
        and kernel["stack"] > max(FEW_BYTES, spilt(kernel))
    }


def test_main_loops_move_no_spilled_registers() -> None:
    assert not {
        name_of(kernel): kernel["loop"]
        for kernel in kernels()
        if kernel.get("dots") and kernel["loop"]["local"] and not spills_in_loop(kernel)
    }


def spills_in_loop(kernel: Kernel) -> bool:
    """Whether the kernel is known to need more registers than there are: attention of prompt chunks
    and with key biases, in int8 on a B200 (docs/internals/gpu.md), and LLM.int8 beyond 32 rows,
    whose rows with outliers have two sums.
    """
    constants = kernel["constants"]
    if constants.get("OUTLIERS") and constants["BLOCK_M"] > 32:
        return True
    return kernel["kernel"] == "attention_kernel" and bool(
        constants["ROWS"] > 16
        or constants["PAIRS"]
        or (kernel["chip"] == "sm_100" and constants["FORMAT"] == "int8")
    )


def test_columns_are_summed_alike_at_every_number_of_rows() -> None:
    """Else a row would have other bits in a larger step. Sums of integers are exact."""
    orders = defaultdict[tuple[str, str, str], set[str]](set)
    for kernel in kernels():
        if "error" not in kernel and kernel["weight"]:
            floats = {dot.split(" ", 2)[2] for dot in kernel["dots"] if " i8 " not in dot}
            orders[kernel["chip"], kernel["kernel"], kernel["weight"]] |= floats
    assert orders
    assert not {weight: found for weight, found in orders.items() if len(found) > 1}
    on_hopper = {dot for (chip, *_), found in orders.items() if chip == "sm_90" for dot in found}
    assert on_hopper <= {"in order"}


def test_products_have_the_instructions_that_tests_replay() -> None:
    """Those that `test_tensor_cores.py` multiplies with, in their order of columns."""
    wrong, seen = dict[str, str](), set[str]()
    for kernel in kernels():
        if kernel["kernel"] != "linear_kernel" or "error" in kernel or kernel["chip"] == "gfx942":
            continue
        is_float32 = "precision='ieee', decoder='plain'" in kernel["weight"] and (
            "compute='f32'" in kernel["weight"]
        )
        is_bf16 = "family='numbers'" in kernel["weight"] and "compute='bf16'" in kernel["weight"]
        cores = cores_of(kernel["chip"], "BF16" if is_bf16 else "")
        order = "in order" if cores.by == 1 else f"by {cores.by}"
        for dot in kernel["dots"]:
            name, kind, found = dot.split(" ", 2)
            if kind != "i8" and not is_float32:
                seen.add(kernel["chip"])
                if (name, found) != (cores.dot, order):
                    wrong[name_of(kernel)] = dot
    assert seen and not wrong


@pytest.mark.skipif(examples(1) == 1, reason="compiles many tiles: make test-triton")
@pytest.mark.parametrize("name", ["BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
def test_tuned_tiles_sum_columns_as_the_rule_does(chip: str, name: str) -> None:
    words = [chip, name, "--rows", "1", "64", "512", "--every", "9"]
    tiles = compiled(*words, program="compiling_tiles")
    assert len(tiles) > 6
    assert len({str(tile["dots"]) for tile in tiles}) == 1


def spilt(kernel: Kernel) -> int:
    """Bytes per thread that are known not to fit into registers."""
    is_attention = kernel["kernel"] == "attention_kernel"
    return ATTENTION_STACK if is_attention else STACKS.get(kernel["kernel"], 0)


def test_products_use_tensor_cores() -> None:
    products = [kernel for kernel in kernels() if "error" not in kernel and multiplies(kernel)]
    assert products
    assert not [
        name_of(kernel)
        for kernel in products
        if not kernel["instructions"].keys() & {"mma", "wgmma"}
    ]
    large = [
        kernel
        for kernel in products
        if kernel["chip"] == "sm_90" and kernel["constants"]["BLOCK_M"] >= 64
    ]
    assert large and not [
        name_of(kernel) for kernel in large if "wgmma" not in kernel["instructions"]
    ]


def test_weight_loads_are_asynchronous() -> None:
    """Loads of 16 bytes are asynchronous; loads of 1 or 2 bytes would stall each round of
    the loop.
    """
    products = [kernel for kernel in kernels() if "error" not in kernel and multiplies(kernel)]
    assert not [name_of(kernel) for kernel in products if not kernel["instructions"].get("async")]
    assert not [
        name_of(kernel)
        for kernel in products
        if kernel["instructions"].keys() & {"load8", "load16"}
    ]
