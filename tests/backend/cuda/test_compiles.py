"""Kernels of whole programs compile for an H100 on any machine, within its memory and
registers, to the expected instructions.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.backend.cuda.examples import examples

ROOT = Path(__file__).parents[3]
SHARED_BYTES = 227 << 10
"""Shared memory of a multiprocessor that one program may use."""
STACKS = {"rope_angles_kernel": 64}
"""Stack bytes per thread: sines of large numbers need some."""
LATENT_ROWS_STACK = 1280
"""Stack bytes for attention over latent rows: sums of 512 numbers for 64 rows exceed the
registers (docs/internals/gpu.md).
"""
KEY_BIAS_STACK = 128
"""Stack bytes for attention with key biases: sines once in a split, and none in its loop."""
FEW_BYTES = 16

Kernel = dict[str, Any]


@cache
def kernels() -> list[Kernel]:
    """Kernels of a few programs, or of all in `make test-triton`. A process without the
    interpreter compiles them.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(ROOT / "build/triton"),
        "PYTHONPATH": path,
    }
    command = [
        sys.executable,
        "-m",
        "tests.backend.cuda.compiling",
        *(["--all"] if examples(1) > 1 else []),
    ]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert not result.returncode, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def name_of(kernel: Kernel) -> str:
    return f"{kernel['case']}, {kernel['rows']} rows: {kernel['kernel']} {kernel['constants']}"


def multiplies(kernel: Kernel) -> bool:
    """Whether the kernel multiplies on tensor cores."""
    constants = kernel["constants"]
    return (
        "PART" in constants
        and "COMPUTE" in constants
        and (constants["COMPUTE"] == "bf16" or constants.get("INT8", False))
    )


def test_all_kernels_compile() -> None:
    failed = {name_of(kernel): kernel["error"] for kernel in kernels() if "error" in kernel}
    assert not failed, "\n".join(f"{name}\n{error}" for name, error in failed.items())
    assert {"linear_kernel", "attention_kernel", "kv_write_kernel", "sample_chunk_kernel"} <= {
        kernel["kernel"] for kernel in kernels()
    }


@pytest.mark.parametrize(("what", "most"), [("shared", SHARED_BYTES), ("stack", FEW_BYTES)])
def test_kernels_fit_in_memory_and_registers(what: str, most: int) -> None:
    """Spilled registers lie in the stack."""
    found = {name_of(kernel): kernel[what] for kernel in kernels() if "error" not in kernel}
    allowed = {
        name_of(kernel): max(most, spilt(kernel) if what == "stack" else 0) for kernel in kernels()
    }
    assert not {name: size for name, size in found.items() if size > allowed[name]}


def spilt(kernel: Kernel) -> int:
    """Bytes per thread that are known not to fit into registers."""
    if kernel["constants"].get("PAIRS") and kernel["kernel"] == "attention_kernel":
        return KEY_BIAS_STACK
    return (
        LATENT_ROWS_STACK
        if kernel["constants"].get("IS_LATENT")
        else STACKS.get(kernel["kernel"], 0)
    )


def test_products_use_tensor_cores() -> None:
    products = [kernel for kernel in kernels() if "error" not in kernel and multiplies(kernel)]
    assert products
    assert not [
        name_of(kernel)
        for kernel in products
        if not kernel["instructions"].keys() & {"mma", "wgmma"}
    ]
    large = [kernel for kernel in products if kernel["constants"]["BLOCK_M"] >= 64]
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
