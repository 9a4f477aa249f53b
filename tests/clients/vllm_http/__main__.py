"""vLLM's own HTTP tests against this server.

vLLM's source distribution is downloaded into `.clients/vllm` when this runs; none of its text is in
this repository. `suite.toml` names the files, and each test that may fail, with the reason. Every
other test must pass, and a test that is not a matter of the model's words must not be listed if it
passes.
"""

import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from headrace.checkpoint.source import resolve
from tests.server.running import Running

HERE = Path(__file__).parent
FOLDER = HERE.parents[2] / ".clients" / "vllm"
SUITE = tomllib.loads((HERE / "suite.toml").read_text())
PACKAGES = (
    "unearth==0.19.0 pytest==9.2.0 pytest-asyncio==1.5.0 pytest-timeout==2.4.0 openai anthropic "
    "requests jsonschema regex transformers==5.24.0 gguf==0.19.0 jinja2 prometheus-client pybase64"
).split()
PREFIX = "tests/entrypoints/"
SECONDS = 60
"""Maximum seconds of a test."""
OWN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
MODEL = "smollm2"
SERVER = ("--max-model-len", "8192", "--kv-blocks", "512")
SERVERS = {
    "chat": SERVER,
    "reasoning": (*SERVER, "--chat-template", str(HERE / "reasoning.jinja")),
}
"""Flags of the servers, by the name that `suite.toml` gives a group of files."""


class Outcome(NamedTuple):
    passed: bool
    text: str


def main() -> int:
    chosen = sys.argv[1:]
    python, tree = set_up()
    outcomes: dict[str, Outcome] = {}
    for server, files in SUITE["files"].items():
        picked = [f for f in files if not chosen or any(word in f for word in chosen)]
        if picked:
            outcomes |= run(python, tree, SERVERS[server], picked)
    return report(outcomes)


def set_up() -> tuple[Path, Path]:
    """Return the python of the tests and the folder of vLLM's files, made if needed."""
    python, tree = FOLDER / "bin/python", FOLDER / "tree"
    if not (FOLDER / "ready").exists():
        venv.create(FOLDER, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, *PACKAGES], check=True, env=OWN)
        (FOLDER / "ready").touch()
    if not tree.exists():
        unpack(download(), tree)
    return python, tree


def download() -> Path:
    """Return the source distribution; pip would build it."""
    wanted = f"vllm=={SUITE['version']}"
    subprocess.run(
        [FOLDER / "bin/unearth", wanted, "--no-binary", "--download", FOLDER],
        check=True,
        stdout=subprocess.DEVNULL,
        env=OWN,
    )
    archive = FOLDER / f"vllm-{SUITE['version']}.tar.gz"
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == SUITE["sha256"], f"{archive}: another file, of sha256 {found}"
    return archive


def unpack(archive: Path, tree: Path) -> None:
    """Extract the HTTP tests, and let them name our model."""
    with tarfile.open(archive) as packed:
        for member in packed:
            path = member.name.partition("/")[2]
            if not (member.isfile() and path.startswith(PREFIX) and path.endswith(".py")):
                continue
            source = packed.extractfile(member)
            assert source
            text = source.read().decode()
            own = re.findall(r'(?m)^MODEL_NAME\b.*= *"(.*)"', text)
            for name in (*own, "claude-3-7-sonnet-latest"):
                text = text.replace(f'"{name}"', f'"{MODEL}"')
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
    (tree / "tests/__init__.py").touch()


def run(python: Path, tree: Path, flags: tuple[str, ...], files: list[str]) -> dict[str, Outcome]:
    """Run files of vLLM's tests against a server; returns the outcomes by test."""
    results = Path(tempfile.mkstemp(".jsonl")[1])
    server = Running(MODEL, *flags)
    own = {"URL": f"http://127.0.0.1:{server.port}", "GGUF": str(resolve(MODEL))}
    own |= {"RESULTS": str(results), "PYTHONPATH": str(HERE)}
    try:
        ran = subprocess.run(
            [
                *(python, "-m", "pytest", "-p", "plugin", "-q", "--tb=short", "--no-header"),
                *("-c", os.devnull, f"--rootdir={tree}", f"--timeout={SECONDS}"),
                *("-p", "no:cacheprovider", "-W", "ignore"),
                *("-o", "asyncio_mode=auto", "--no-summary"),
                *(PREFIX + file for file in files),
            ],
            cwd=tree,
            env=OWN | own,
        )
    finally:
        ended = server.stop()
    assert ran.returncode in (0, 1), f"pytest ended with {ran.returncode}"
    assert ended == 0, "".join(server.log)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    results.unlink()
    return {
        line["test"].removeprefix(PREFIX): Outcome(line["outcome"] == "passed", line["text"])
        for line in lines
        if line["outcome"] != "skipped"
    }


def report(outcomes: dict[str, Outcome]) -> int:
    """Print the counts and what is unexpected; returns the exit code."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    for name, outcome in outcomes.items():
        reason = next(
            (group for group in SUITE["left_out"] if any(matches(name, t) for t in group["tests"])),
            None,
        )
        if outcome.passed:
            counts["passed"] += 1
            if reason and reason["kind"] != "model":
                faults.append(f"{name} passes, so suite.toml must not list it")
        elif reason:
            counts[f"left out: {reason['kind']}"] += 1
        else:
            counts["failed"] += 1
            faults.append(f"{name}\n{outcome.text}")
    print(*faults, sep="\n\n")
    print(f"vLLM {SUITE['version']}: {len(outcomes)} tests over HTTP:", dict(counts))
    return 1 if faults else 0


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern names a test; only `*` has a meaning."""
    return fnmatch.fnmatchcase(name, re.sub(r"([\[\]?])", r"[\1]", pattern))


if __name__ == "__main__":
    sys.exit(main())
