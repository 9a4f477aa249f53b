"""`make sanitize`: the native code under AddressSanitizer and UndefinedBehaviorSanitizer, and the
thread pool under ThreadSanitizer.

Two builds of their own, in build/sanitize. Python is not instrumented, so the sanitizer's library
is loaded before it, and looks for no leaks: CPython keeps what it has until its process ends.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "sanitize"
SHORT = (
    "tests/backend/test_hostile_plan.py",
    "tests/backend/test_not_finite.py",
    "tests/sampling/test_expand.py",
)
WHOLE = ("tests/backend", "tests/sampling", "tests/quant")
"""Tests that run native code, those of the short form first."""
LEFT_OUT = "tests/backend/test_cpu_memory.py"
"""What a process has in memory under a sanitizer is mostly the sanitizer's."""
FLAGS = (
    "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined,float-cast-overflow "
    "-fno-sanitize-recover=all"
)
KERNEL_FLAGS = (
    "-g1 --param=asan-stack=0 -fno-sanitize-address-use-after-scope "
    "--param=asan-instrumentation-with-call-threshold=0 "
    "-fno-sanitize=alignment,null,object-size,pointer-overflow,vptr"
)
"""For the kernels, which are one inlined function for each format and number of rows. With every
check and the variables for a debugger one of their units takes over 20 minutes and 9 GB to compile,
so 2 minutes and 2 GB. Left out are checks of pointers that AddressSanitizer makes too, and of a
kernel's own arrays; the arrays of its caller are checked.
"""
OPTIONS = {
    # too large a request is a std::bad_alloc, as without
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


COMPILER = os.environ.get("CXX", "g++")


def run(*command: object, **environment: str) -> None:
    print("+", *command, flush=True)
    if code := subprocess.run(
        [str(part) for part in command], cwd=ROOT, env={**os.environ, **environment}
    ).returncode:
        sys.exit(f"this ended with {code}")


def check_pool() -> None:
    """Build and run the stress of the thread pool. Addresses are not randomised: ThreadSanitizer
    knows where it expects them.
    """
    program = FOLDER / "pool_stress"
    sources = [ROOT / "tests" / "native" / "pool_stress.cpp", ROOT / "csrc" / "pool.cpp"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    run(
        COMPILER,
        *"-std=c++20 -O1 -g -Wall -Wextra -Werror -fsanitize=thread -pthread -I csrc -o".split(),
        program,
        *sources,
    )
    run("setarch", "-R", program)


def build() -> Path:
    """Build the extension for the instruction sets that this processor has, and say where it is."""
    cpu = Path("/proc/cpuinfo").read_text()
    wide = "avx512bf16" if "avx512_bf16" in cpu else "avx512"
    isas = f"avx2;{wide}" if "avx512bw" in cpu else "avx2"
    folder = [
        "-S",
        ROOT,
        "-B",
        FOLDER,
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DHEADRACE_ISAS={isas}",
        f"-DHEADRACE_KERNEL_FLAGS={KERNEL_FLAGS.replace(' ', ';')}",
    ]
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    run("cmake", *folder, *launcher, "-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={FLAGS}")
    run("cmake", "--build", FOLDER, "--parallel", os.cpu_count() or 1)
    return next(FOLDER.glob("_native*.so"))


def preloaded() -> str:
    """The sanitizer's library, and the C++ library whose exceptions it follows."""
    ask = [COMPILER, "-print-file-name=libasan.so"], [COMPILER, "-print-file-name=libstdc++.so.6"]
    return " ".join(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        for command in ask
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.native.sanitize", description=__doc__)
    parser.add_argument("--short", action="store_true", help="run fewer tests")
    args = parser.parse_args(arguments)
    check_pool()
    environment = {"HEADRACE_NATIVE": str(build()), "LD_PRELOAD": preloaded(), **OPTIONS}
    # What a sanitizer says when it ends the process would be lost in pytest's capture of the file
    # descriptors.
    options = ["-p", "tests.native.instead", "--capture=sys", f"--ignore={LEFT_OUT}"]
    run(sys.executable, "-m", "pytest", *options, *(SHORT if args.short else WHOLE), **environment)


if __name__ == "__main__":
    main(sys.argv[1:])
