"""`headrace completion`: candidates, and the scripts in real shells."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cli.completion import SCRIPTS, complete
from headrace.cli.main import COMMANDS, main, make_parser


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("pro", ["profile"]),
        ("ru", ["run"]),
        ("--v", ["--version"]),
        ("run --kv-dt", ["--kv-dtype"]),
        ("run --kv-dtype int", ["int8", "int4"]),
        ("run --kv-dtype = int", ["int8", "int4"]),
        ("run --kv-dtype =", ["auto", "bf16", "f16", "f32", "fp8", "int8", "int4", "k8v4"]),
        ("run --kv-dtype=b", ["--kv-dtype=bf16"]),
        ("run --quiet --activations", ["--activations"]),
        ("run --quiet --act", ["--activations", "--activation-sparsity"]),
        ("run --draft-model smol", ["smollm2"]),
        ("run smol", ["smollm2"]),
        ("run --threads 2 --quiet smol", ["smollm2"]),
        ("bench thr", ["throughput"]),
        ("bench latency smol", ["smollm2"]),
        ("completion ba", ["bash"]),
        ("completion --wo", []),
        ("nothing ru", []),
        ("run --threads 1", []),
    ],
)
def test_completion_candidates(line: str, candidates: list[str]) -> None:
    assert complete(line.split(" "))[0] == candidates


@pytest.mark.parametrize(
    ("line", "takes_file"),
    [
        ("run ", True),
        ("run smollm2 ", False),
        ("run --medusa-heads ", True),
        ("run --threads ", False),
        ("profile --svg ", True),
        ("convert smollm2 ", True),
        ("batch ", True),
        ("batch in.jsonl ", True),
        ("ls ", False),
    ],
)
def test_completion_of_files(line: str, takes_file: bool) -> None:
    assert complete(line.split(" "))[1] == takes_file


@pytest.mark.parametrize("command", COMMANDS)
def test_completion_knows_all_options_of_a_command(command: str) -> None:
    flags = complete([command, "-"])[0]
    assert {"-h", "--help"} <= set(flags)
    hidden = {"--words"} if command == "completion" else set()
    assert set(flags) == make_parser(command)._option_string_actions.keys() - hidden


def test_completion_prints_the_reply_to_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--words", "run", "--kv-dtype", "b"]) == 0
    assert capsys.readouterr().out == "words\nbf16\n"
    assert main(["completion", "--words", "run", "--he"]) == 0
    assert capsys.readouterr().out == "words\n--help\n"
    assert main(["completion", "--words", "run", ""]) == 0
    assert capsys.readouterr().out.startswith("files\nsmollm2\n")


def test_completion_without_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 2
    assert "SHELL is missing; write bash, zsh or fish" in capsys.readouterr().err
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with `headrace` on the path, and the scripts in `tmp_path`."""
    program = tmp_path / "bin/headrace"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m headrace "$@"\n')
    program.chmod(0o755)
    for shell, script in SCRIPTS.items():
        (tmp_path / shell).write_text(script)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "TERM": "dumb"}


def type_in_bash(
    rc_file: Path, environment: dict[str, str], folder: Path, keys: list[tuple[str, str]]
) -> None:
    """Type keys into an interactive bash, and wait for the text that each must give."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "--noprofile", "--rcfile", str(rc_file), "-i"], environment)
    try:
        for typed, expected in [("", "$ "), *keys]:
            os.write(terminal, typed.encode())
            seen, deadline = "", time.monotonic() + 150
            while expected not in re.sub(r"[\r\x07\x08]", "", seen):
                timeout = max(0, deadline - time.monotonic())
                assert select.select([terminal], [], [], timeout)[0], (typed, seen)
                seen += os.read(terminal, 4096).decode(errors="replace")
    finally:
        os.close(terminal)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_completion_in_bash(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "model-file.gguf").touch()
    keys = [
        ("headrace prof\t", "headrace profile "),
        ("--kv-dt\t", "--kv-dtype "),
        ("b\t", "bf16 "),
        ("\x15headrace run smoll\t", "smollm2 "),
        ("\x15headrace show model-f\t", "model-file.gguf "),
    ]
    rc_file = tmp_path / "bashrc"
    rc_file.write_text(f"{SCRIPTS['bash']}PS1='$ '\n")
    type_in_bash(rc_file, environment, tmp_path, keys)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_completion_in_fish(tmp_path: Path, environment: dict[str, str]) -> None:
    lines = ["headrace prof", "headrace run --kv-dtype b", "headrace show model-f"]
    (tmp_path / "model-file.gguf").touch()
    script = f"source {tmp_path}/fish; " + "; ".join(f"complete -C '{line}'" for line in lines)
    result = subprocess.run(
        ["fish", "--no-config", "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["profile", "bf16", "model-file.gguf"]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_completion_script_is_valid(
    shell: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", tmp_path / shell], env=environment, check=True)
