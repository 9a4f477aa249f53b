"""The command line against the table of invocations. `make cli` runs all rows, and sends signals at
random moments.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.conftest import SPECIAL, metadata, tensors, write_tiny_gguf
from tests.checkpoint.test_source import MEMBER, write_wheel
from tests.cli.invocations import ROWS
from tests.cli.invoke import MARKED, Row, faults, filled, run_apart, run_here

ROUNDS = int(os.environ.get("HEADRACE_CLI_ROUNDS", "0"))
"""Signals at random moments; with any, all rows are run."""
CHOSEN = [row for row in ROWS if row.is_short or ROUNDS]
COMMANDS = (
    "run {long} hello",
    "run {long} hello --json --max-tokens 2000",
    "pull pypi:tiny-model/{member}",
    "rm nothing",
    "ls",
    "show {model}",
    "profile {model} --prefill 16 --depth none --turns 2",
    "bench latency {model} --pp 8 --tg 2 --depth 0 --repetitions 2",
    "top --json",
    "calibrate {model} --prompt hello --tokens 16",
    "doctor",
)


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The files and folders that rows name."""
    root = tmp_path_factory.mktemp("invocations")
    places: dict[str, object] = {
        name: root / name for name in ("cache", "fifo", "index", "broken.gguf")
    }
    places |= {"broken": root / "broken.gguf", "member": MEMBER}
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokens = metadata("llama")["tokenizer.ggml.tokens"]
    endless = {
        "tokenizer.ggml.tokens": ["<a>", "<b>", "<c>", *tokens[len(SPECIAL) :]],
        "tokenizer.ggml.eos_token_id": None,
    }
    for name, context, change in (
        ("model", 256, {}),
        ("long", 1 << 20, endless),
        ("huge", (1 << 31) - 1, {}),
    ):
        (root / name).mkdir()
        change = {"tokenizer.chat_template": template, "llama.context_length": context, **change}
        places[name] = write_tiny_gguf(root / name / "tiny.gguf", change)
    second = {name: None for name in tensors(1) if name.startswith("blk.1.")}
    places["one"] = write_tiny_gguf(root / "one.gguf", {"llama.block_count": 1}, second)
    os.mkfifo(root / "fifo")
    (root / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    (root / "index").mkdir()
    write_wheel(root / "index", "1.2")
    return places


def ready(row: Row, places: dict[str, object], tmp_path: Path) -> Row:
    """The row with its names filled in, in an environment of its own."""
    env = {
        "HEADRACE_CACHE": "{cache}",
        "HEADRACE_STATS": "{tmp}/stats",
        "PIP_FIND_LINKS": "{index}",
    }
    env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHONUNBUFFERED": "", **row.env}
    rubbish = tmp_path / "rubbish"
    rubbish.mkdir(mode=0o700)
    fill_with_invalid_records(rubbish)
    return filled(
        row._replace(env=env),
        {**places, "tmp": tmp_path, "locked": tmp_path / "locked", "rubbish": rubbish},
    )


def fill_with_invalid_records(folder: Path) -> None:
    """Write files that are neither records of an engine nor measurements of a machine."""
    for i, text in enumerate(
        (
            "",
            "[]",
            "9" * 5000,
            '"x"',
            "{" * 100_000,
            '{"version": 2, "stats": {}}',
            '{"version": 2, "stats": null}',
        )
    ):
        (folder / f"{os.getpid()}-{i}.json").write_text(text)
    (folder / f"{os.getpid()}-x.json").write_bytes(bytes(range(256)))
    (folder / "1-1.json").mkdir()
    os.mkfifo(folder / f"{os.getpid()}-y.json")
    (folder / "machine.json").write_text('{"a": [1, {"b": 1e999}]}' * 3)


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.words[:60] or "nothing")
def test_invocation(
    row: Row,
    places: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = ready(row, places, tmp_path)
    assert not faults(
        row, run_apart(row) if row.needs_process else run_here(row, monkeypatch, capsys)
    )


def test_pull_onto_a_full_disk(places: dict[str, object], tmp_path: Path) -> None:
    """A disk of 64 kB, if this machine can mount one; the rows limit the size of files instead."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("this machine does not let us mount a disk")
    try:
        row = Row(
            "pull pypi:tiny-model/{member}",
            1,
            "No space left on device; free some",
            env={"HEADRACE_CACHE": str(disk)},
            stdin=" ",
        )
        row = ready(row, places, tmp_path)
        assert not faults(row, run_apart(row)) and not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


INTERRUPTED = """
import signal, sys
from headrace.cli import entry
class Finder:
    imports = 0
    def find_spec(self, *names):
        Finder.imports += 1
        if Finder.imports == {number}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["headrace", "run", "nothing", "hello"]
entry()
"""


@pytest.mark.parametrize("number", range(1, 400) if ROUNDS else (1, 2, 5, 20, 60))
def test_ctrl_c_during_imports(number: int) -> None:
    """At each of the modules that it imports, from the first one on."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(number=number)], capture_output=True
    )
    assert (done.returncode, done.stderr) == (130, b"") or (number > 100 and done.returncode == 3)


@pytest.mark.parametrize("number", range(ROUNDS or 2))
def test_signals_at_random_moments(number: int, places: dict[str, object], tmp_path: Path) -> None:
    random_ = random.Random(number)
    name, words = random_.choice(("INT", "TERM", "HUP")), random_.choice(COMMANDS)
    code = {"INT": 130, "TERM": 143, "HUP": 129}[name]
    row = ready(Row(words, code, stdin=" ", signal=name), places, tmp_path)
    outcome = run_apart(row, MARKED, random_.uniform(0, 1.5))
    text = f"{outcome.out}{outcome.err}"
    assert not [
        words for words in ("Traceback", "Exception ignored", "internal error") if words in text
    ], text
    assert outcome.code in (
        0,
        1,
        3,
        code,
        128 - code,
    )  # the last: before the process handles signals, the system does
    assert len(outcome.err.splitlines()) <= 2
