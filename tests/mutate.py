"""Mutation tests: `make mutate`, or `make mutate MODULE=planner/roofline`.

The tests of the mirroring folder run against mutants of each part, in a copy under build/mutate.
`make mutate MODULE=engine/meter TESTS="test_stats.py"` runs fewer tests on one file. Results are
kept there: the next run resumes, retries mutants that survived, and repeats changed functions.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build/mutate"
PARTS = {  # value: tests that do not run, because they take minutes and cover the whole engine
    **{part: () for part in ("program", "planner", "kv", "acceptors", "speculation")},
    "engine": tuple(
        f"test_{name}.py"
        for name in ("machine*", "promise*", "composability", "overload", "drafts_real")
    ),
}
CONFIG = """[mutmut]
source_paths=headrace
only_mutate=headrace/{part}/*
do_not_mutate_patterns=^\\s*assert
pytest_add_cli_args_test_selection={selected}
pytest_add_cli_args=
    -p
    no:cacheprovider
{ignored}
also_copy=
    conftest.py
    docs
use_git_change_detection=false
track_dependencies=false
timeout_multiplier=4.0
timeout_constant=10.0
"""
CONFTEST = """from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "mutate",
    database=None,
    phases=(Phase.explicit, Phase.generate),  # a failure is enough: it need not be small
    suppress_health_check=[HealthCheck.differing_executors],  # every run has its own instances of test classes
)
settings.load_profile("mutate")
"""  # noqa: E501
_NOISE = (r",? *\bstrict=\w+", r", *(?=\))", r"(?<=\bcast\()[^,]*")
"""Changes that no test can notice: strictness of zips, trailing commas, types of casts."""


def main(module: str, tests: list[str]) -> None:
    """Run all mutants of a part, of one file with these tests, or of every part."""
    part, _, file = module.partition("/")
    if part and part not in PARTS:
        sys.exit(f"unknown part {part!r}; choose from: {', '.join(PARTS)}")
    if tests and not file:
        sys.exit("TESTS needs a single file; set MODULE=part/file")
    for name in [part] if part else PARTS:
        folder = WORK / (f"{name}-{file}" if tests else name)  # which tests there are is kept, too
        _prepare(name, folder, tests)
        _mutmut(
            folder,
            "run",
            "--max-children",
            "1",
            *([f"headrace.{name}.{file.removesuffix('.py')}.*"] if file else []),
        )
        _report(name, folder)


def _prepare(part: str, folder: Path, tests: list[str]) -> None:
    """Copy the tree over the kept results, and forget which mutants survived."""
    for name in ("headrace", "tests", "docs", "mutants/tests", "mutants/docs"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("headrace", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", folder)
    native = find_spec("headrace._native")
    assert native and native.origin
    shutil.copy2(native.origin, folder / "headrace")
    ignored = "\n".join(f"    --ignore-glob=tests/{part}/{name}" for name in PARTS[part])
    selected = "".join(f"\n    tests/{part}/{name}" for name in tests) or f"tests/{part}"
    (folder / "setup.cfg").write_text(CONFIG.format(part=part, ignored=ignored, selected=selected))
    (folder / "conftest.py").write_text(CONFTEST)
    for file in folder.glob("mutants/**/*.meta"):
        found = json.loads(file.read_text())
        codes = found["exit_code_by_key"]
        found["exit_code_by_key"] = {
            name: code if _status(code) in ("killed", "timeout") else None
            for name, code in codes.items()
        }
        file.write_text(json.dumps(found))


def _mutmut(folder: Path, *words: str) -> str:
    """Run mutmut in the copy, and return its output if it only shows something.

    Without `site`, Python ignores the editable installation, which would come before the mutants.
    `setquit` restores `exit`.
    """
    start = "import site; site.setquit(); from mutmut.__main__ import cli; cli()"
    packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(packages),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    wanted = subprocess.PIPE if words[0] == "show" else None
    done = subprocess.run(
        [sys.executable, "-S", "-c", start, *words],
        cwd=folder,
        env=environment,
        stdout=wanted,
        text=True,
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def _report(part: str, folder: Path) -> None:
    """Print the outcomes of each file's mutants, and the changes of the survivors."""
    survivors = []
    print(f"\n{part}")
    for file in sorted(folder.glob(f"mutants/headrace/{part}/*.meta")):
        codes = json.loads(file.read_text())["exit_code_by_key"]
        print(f"  {file.stem}: {dict(Counter(map(_status, codes.values())))}")
        survivors += [name for name, code in codes.items() if _status(code) == "survived"]
    for name in survivors:
        change = [
            line
            for line in _mutmut(folder, "show", name).splitlines()
            if re.match(r"[+-](?![+-]{2})", line)
        ]
        if len({_essence(line[1:]) for line in change}) > 1:
            print(f"\n{name}", *change, sep="\n")


def _essence(line: str) -> str:
    for noise in _NOISE:
        line = re.sub(noise, "", line)
    return line


def _status(code: int | None) -> str:
    from mutmut.stats import status_by_exit_code

    return str(status_by_exit_code[code])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:])
