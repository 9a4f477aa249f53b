"""The kernels of whole programs compile for an H100, on any machine: within its memory and its
registers, and to the instructions meant.
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
"""What a program may have of the shared memory of a multiprocessor."""
STACKS = {"rope_angles_kernel": 64}
"""Bytes of a thread that lie in memory: sines of large numbers need some."""
OF_LATENT_ROWS = 1280
"""The same in attention over latent rows, whose sums of 512 numbers for 64 rows do not fit beside
what is added to them: docs/internals/gpu.md.
"""
FEW_BYTES = 16

Kernel = dict[str, Any]


@cache
def kernels() -> list[Kernel]:
    """Those of a few programs, or of all in `make test-triton`. Kernels of GPUs are compiled in a
    process that does not interpret them.
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
    """Whether its products are those of tensor cores."""
    constants = kernel["constants"]
    return (
        "PART" in constants
        and "COMPUTE" in constants
        and (constants["COMPUTE"] == "bf16" or constants.get("INT8", False))
    )


def test_all_compile() -> None:
    failed = {name_of(kernel): kernel["error"] for kernel in kernels() if "error" in kernel}
    assert not failed, "\n".join(f"{name}\n{error}" for name, error in failed.items())
    assert {"linear_kernel", "attention_kernel", "kv_write_kernel", "sample_chunk_kernel"} <= {
        kernel["kernel"] for kernel in kernels()
    }


@pytest.mark.parametrize(("what", "most"), [("shared", SHARED_BYTES), ("stack", FEW_BYTES)])
def test_they_fit(what: str, most: int) -> None:
    """Registers that spill lie in the stack."""
    found = {name_of(kernel): kernel[what] for kernel in kernels() if "error" not in kernel}
    allowed = {
        name_of(kernel): max(most, spilt(kernel) if what == "stack" else 0) for kernel in kernels()
    }
    assert not {name: size for name, size in found.items() if size > allowed[name]}


def spilt(kernel: Kernel) -> int:
    """Bytes of a thread that are known not to fit into registers."""
    return (
        OF_LATENT_ROWS if kernel["constants"].get("IS_LATENT") else STACKS.get(kernel["kernel"], 0)
    )


def test_products_are_those_of_tensor_cores() -> None:
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


def test_weights_are_on_their_way_while_others_are_multiplied() -> None:
    """Loads of 16 bytes that no register waits for; those of 1 or 2 bytes would be waited for in
    every round of the loop.
    """
    products = [kernel for kernel in kernels() if "error" not in kernel and multiplies(kernel)]
    assert not [name_of(kernel) for kernel in products if not kernel["instructions"].get("async")]
    assert not [
        name_of(kernel)
        for kernel in products
        if kernel["instructions"].keys() & {"load8", "load16"}
    ]
