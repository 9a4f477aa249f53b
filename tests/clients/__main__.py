"""Client libraries against running servers, each in its newest version in a virtual environment.

The environments are in `.clients`. A script `with_NAME.py` uses its client as programs do. If two
clients send the same request, they must get the same response.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.clients.checks import KEY
from tests.server.running import running
from tests.server.tool_calling_model import write_caller_gguf

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".clients"
REQUIREMENTS = {
    "openai": "openai",
    "anthropic": "anthropic",
    "litellm": "litellm[mcp]!=1.82.7,!=1.82.8",  # these two were not released by its authors
    "langchain": "langchain-openai",
    "llm": "llm",
}
OWN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""Environment variables of the clients, which inherit no others."""
SECONDS = 600.0
"""Maximum seconds per client."""


def main() -> int:
    names = sys.argv[1:] or list(REQUIREMENTS)
    versions = {name: installed(name) for name in names}
    with ExitStack() as stack:
        caller = write_caller_gguf(
            Path(stack.enter_context(tempfile.TemporaryDirectory())) / "caller.gguf"
        )
        flags = ("--api-key", KEY, "--max-model-len", "8192", "--ignore-advised-sampling")
        servers = {
            "CHAT": ("smollm2", *flags),
            "CALLER": (str(caller), "--api-key", KEY, "--threads", "1", "--kv-blocks", "64"),
            "NARROW": ("smollm2", *flags, "--max-num-seqs", "1", "--max-waiting", "0"),
            "HASTY": ("smollm2", *flags, "--request-timeout", "1"),
        }
        ports = {
            name: stack.enter_context(contextmanager(running)(*options)).port
            for name, options in servers.items()
        }
        env = OWN | {f"{name}_URL": f"http://127.0.0.1:{port}/v1" for name, port in ports.items()}
        results = {name: run_client(name, env) for name in names}
    return report(versions, results)


def installed(name: str) -> str:
    """Install a client if needed; returns its distribution and version."""
    folder, requirement = FOLDER / name, REQUIREMENTS[name]
    pip = [str(python_of(name)), "-m", "pip", "-q", "--disable-pip-version-check"]
    if not (folder / "ready").exists():
        print(f"[set-up] {requirement} in {folder.relative_to(HERE.parents[1])}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([*pip, "install", requirement], check=True, env=OWN)
        (folder / "ready").touch()
    distribution = re.split(r"[\[!]", requirement, maxsplit=1)[0]
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    version = subprocess.run(
        [python_of(name), "-c", code], check=True, capture_output=True, text=True, env=OWN
    ).stdout.strip()
    return f"{distribution} {version}"


def python_of(name: str) -> Path:
    return FOLDER / name / "bin" / "python"


def run_client(name: str, env: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the results of a client's checks by name."""
    ran = subprocess.run(
        [python_of(name), HERE / f"with_{name}.py"],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    ended = {
        "check": "the script itself",
        "passed": ran.returncode == 0,
        "answer": f"exit code {ran.returncode}",
    }
    return {line["check"]: line for line in [*lines, *([] if ended["passed"] else [ended])]}


def report(versions: dict[str, str], results: dict[str, dict[str, dict[str, Any]]]) -> int:
    """Print the results; returns the exit code."""
    table = Table("", *versions.values())
    failures: list[str] = []
    for check in dict.fromkeys(check for result in results.values() for check in result):
        lines = {name: result[check] for name, result in results.items() if check in result}
        responses = {line["answer"] for line in lines.values() if line["passed"]} - {None}
        failures += [
            f"{name}: {check}:\n{line['answer']}"
            for name, line in lines.items()
            if not line["passed"]
        ]
        failures += (
            [f"{check}: the clients' responses differ: {sorted(responses)}"]
            if len(responses) > 1
            else []
        )
        cells = (
            "" if name not in lines else "passed" if lines[name]["passed"] else "FAILED"
            for name in results
        )
        table.add_row(check, *cells)
    Console(width=120).print(table, *failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
