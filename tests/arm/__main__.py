"""`make test-arm`: the extension compiled for aarch64, and tests of native code under qemu's
emulation of a process.

It says whether the kernels are right, and nothing of their speed. The emulation runs on this
machine's memory, which keeps an order that ARM does not promise: of that tests/native/test_pool.py
is the judge, by the rules of C++.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.arm import sysroot
from tests.arm.sysroot import FOLDER, PACKAGES, ROOT, SYSROOT, run

TREE = FOLDER / "tree"
"""A copy of the package and its tests, with the extension for aarch64 in it."""
BUILD = FOLDER / "build"
BACKEND = "adapters cpu_linear experts head_ops not_finite sparse_weights"
SAMPLING = "expand masks sampler"
TESTS = (
    *(f"tests/backend/test_{name}.py" for name in BACKEND.split()),
    *(f"tests/sampling/test_{name}.py" for name in SAMPLING.split()),
    "tests/quant/test_kv.py",
)
"""What calls kernels with little around them. Programs that are held to the reference, in NumPy,
take an hour under emulation.
"""
LEFT_OUT = (
    "tests/backend/test_cpu_memory.py",
    "tests/backend/test_hostile_plan.py",
    "tests/backend/test_weight_bytes.py",
)
"""Memory is the emulator's here, which heeds no limit of it: what asks for more than there is would
get all that this machine has.
"""
COMPILER = "aarch64-linux-gnu-g++"
CPUS = {"cortex-a53": ["portable"], "cortex-a76": ["portable", "neon"]}
"""Processors that qemu knows, and the instruction sets of ours that they have."""
ALIKE = {"portable": "portable", "neon": "avx2"}
"""Which instruction sets of x86 take and round their sums alike."""


def build(python: Path) -> Path:
    """Build the extension, and say where it is."""
    target = [
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
    ]
    # A header of Python's names another by the folder of its architecture, which is looked for
    # last.
    headers = SYSROOT / "usr/include"
    found = [
        f"-DPython_EXECUTABLE={python}",
        f"-DPython_INCLUDE_DIR={next(headers.glob('python3.*'))}",
    ]
    run(
        "cmake",
        "-S",
        ROOT,
        "-B",
        BUILD,
        *found,
        *target,
        "-DHEADRACE_ISAS=all",
        f"-DCMAKE_CXX_FLAGS=-idirafter {headers}",
        env=environment(),
    )
    run(
        "cmake",
        "--build",
        BUILD,
        "--parallel",
        os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2"),
        env=environment(),
    )
    return next(BUILD.glob("_native*.so"))


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{TREE}:{PACKAGES}",
        "PYTHONDONTWRITEBYTECODE": "1",
        **more,
    }


def copy_tree(extension: Path) -> None:
    shutil.rmtree(TREE, ignore_errors=True)
    for part in ("headrace", "tests"):
        shutil.copytree(
            ROOT / part, TREE / part, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", TREE)
    shutil.copy(extension, TREE / "headrace")


def check_pool() -> None:
    """Run the stress of the thread pool. That its code is right for a processor that reorders
    memory, ThreadSanitizer says elsewhere.
    """
    program = FOLDER / "pool_stress"
    sources = [ROOT / "tests" / "native" / "pool_stress.cpp", ROOT / "csrc" / "pool.cpp"]
    run(
        COMPILER,
        *"-std=c++20 -O2 -Wall -Wextra -Werror -static -pthread -I csrc -o".split(),
        program,
        *sources,
    )
    run("qemu-aarch64", program)


def check_choice(python: Path) -> None:
    """A processor without dot products of bytes runs the portable kernels, one with them those of
    NEON.
    """
    for cpu, expected in CPUS.items():
        command: list[str | Path] = [
            python,
            "-c",
            "from headrace import _native; print(*_native.isas())",
        ]
        found = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            cwd=TREE,
            env=environment(QEMU_CPU=cpu),
        ).stdout.split()
        if found != expected:
            sys.exit(f"{cpu} has {found}, not {expected}")


def check_tokens(python: Path) -> None:
    """Tiny models answer with the tokens and log-probabilities of this machine's x86 kernels that
    round alike, to the last bit.
    """
    here = json.loads(answers([sys.executable], ROOT, None))
    there = json.loads(answers([python], TREE, environment()))
    for isa, same in ALIKE.items():
        if same not in here:
            print(f"{isa}: this machine has no {same} to compare with")
            continue
        if differing := [
            model for model, outputs in there[isa].items() if outputs != here[same][model]
        ]:
            sys.exit(f"{isa} on aarch64 answers otherwise than {same} here: {', '.join(differing)}")
        print(
            f"{isa} on aarch64 has the tokens and log-probabilities of {same} here, bit "
            f"by bit, in {len(there[isa])} models"
        )


def answers(python: Sequence[str | Path], folder: Path, env: dict[str, str] | None) -> str:
    return subprocess.run(
        [*python, "-m", "tests.arm.tokens"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
        env=env,
    ).stdout


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.arm", description=__doc__)
    parser.add_argument("tests", nargs="*", default=TESTS, help="what pytest runs")
    args = parser.parse_args(arguments)
    sysroot.check_commands()
    python = sysroot.python()
    sysroot.install(python)
    copy_tree(build(python))
    check_pool()
    check_choice(python)
    check_tokens(python)
    left_out = [f"--ignore={path}" for path in LEFT_OUT]
    run(
        python,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *left_out,
        *args.tests,
        cwd=TREE,
        env=environment(),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
