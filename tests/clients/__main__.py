"""Client libraries against running servers, each in an environment of its own.

The environments are in `.clients`. A script `with_NAME.py` or `with_NAME.mjs` uses its client as
programs do. If two clients send the same request, they must get the same response. The name
`headrace` is `LLM`, whose scores lm-eval must get over HTTP.
"""

import json
import os
import re
import shutil
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
PYTHON = {
    "openai": "openai",
    "anthropic": "anthropic",
    "litellm": "litellm[mcp]!=1.82.7,!=1.82.8",  # these two were not released by its authors
    "langchain": "langchain-openai",
    "llm": "llm",
    "instructor": "instructor==1.17.0",
    "pydantic_ai": "pydantic-ai-slim[openai]==2.68.0",
    "openai_agents": "openai-agents==0.24.0",
    "llama_index": "llama-index-llms-openai-like==0.8.1 llama-index-embeddings-openai-like==0.4.0",
    "dspy": "dspy[numpy]==3.4.1",
    "lm_eval": "lm-eval[api]==0.4.13",
}
NODE = {
    "node_openai": "openai@6.49.0 zod@4.6.7",
    "node_anthropic": "@anthropic-ai/sdk@1.14.0",
    "node_ai": "ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.92 "
    "@ai-sdk/anthropic@3.0.140",
    "node_langchain": "langchain@1.5.14 @langchain/core@1.4.0 @langchain/openai@1.5.8 "
    "@langchain/anthropic@1.5.11",
}
"""Packages of the clients of Python and of Node, each list's first one being the client."""
ITSELF = "headrace"
OWN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""Environment variables of the clients, which inherit no others."""
SECONDS = 600.0
"""Maximum seconds per client."""


def main() -> int:
    names = sys.argv[1:] or [ITSELF, *PYTHON, *(NODE if shutil.which("npm") else ())]
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
    if name == ITSELF:
        return "LLM"
    folder, packages = FOLDER / name, (PYTHON | NODE)[name].split()
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != " ".join(packages):
        print(f"[set-up] {name} in {folder.relative_to(HERE.parents[1])}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        (install_python if name in PYTHON else install_node)(folder, packages)
        ready.write_text(" ".join(packages))
    return version_of_python(name) if name in PYTHON else " ".join(packages[0].rsplit("@", 1))


def install_python(folder: Path, packages: list[str]) -> None:
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *packages], check=True, env=OWN)


def install_node(folder: Path, packages: list[str]) -> None:
    folder.mkdir(parents=True)
    (folder / "package.json").write_text("{}")
    npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--save-exact"]
    subprocess.run([*npm, *packages], check=True, env=OWN, cwd=folder)


def version_of_python(name: str) -> str:
    distribution = re.split(r"[\[!=]", PYTHON[name].split()[0], maxsplit=1)[0]
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    version = subprocess.run(
        [python_of(name), "-c", code], check=True, capture_output=True, text=True, env=OWN
    ).stdout.strip()
    return f"{distribution} {version}"


def python_of(name: str) -> Path:
    return Path(sys.executable) if name == ITSELF else FOLDER / name / "bin" / "python"


def command_of(name: str) -> list[str | Path]:
    """Return the command of a client's script; Node finds packages beside the script only."""
    if name not in NODE:
        return [python_of(name), HERE / f"with_{name}.py"]
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, FOLDER / name)
    return ["node", FOLDER / name / f"with_{name}.mjs"]


def run_client(name: str, env: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the results of a client's checks by name."""
    ran = subprocess.run(
        command_of(name), env=env, stdout=subprocess.PIPE, text=True, timeout=SECONDS
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
    table = Table("", "passed", "failed")
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
    for name, result in results.items():
        passed = sum(line["passed"] for line in result.values())
        table.add_row(versions[name], str(passed), str(len(result) - passed))
    Console(width=120).print(table, *failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
