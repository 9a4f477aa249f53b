"""The command line against the table of invocations."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.source import cache_folder
from tests.checkpoint.conftest import tensors, write_tiny_gguf
from tests.checkpoint.test_source import MEMBER, write_wheel
from tests.cli import invocations
from tests.cli.invoke import Row, faults, filled, run_apart, run_here


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return make_places(tmp_path_factory.mktemp("invocations"))


def make_places(root: Path) -> dict[str, object]:
    """The files and folders that rows name."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    names = {"model": {}, "long": {"llama.context_length": 1 << 20}, "huge": {"llama.context_length": (1 << 31) - 1}}
    places: dict[str, object] = {"cache": root / "cache", "fifo": root / "fifo", "broken": root / "broken.gguf", "member": MEMBER}
    for name, change in names.items():
        (root / name).mkdir()
        places[name] = write_tiny_gguf(root / name / "tiny.gguf", {"tokenizer.chat_template": template, **change})
    second = {name: None for name in tensors(1) if name.startswith("blk.1.")}
    places["one"] = write_tiny_gguf(root / "one.gguf", {"llama.block_count": 1}, second)
    os.mkfifo(root / "fifo")
    (root / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    (root / "index").mkdir()
    write_wheel(root / "index", "1.2")
    places["index"] = root / "index"
    return places


def conditions(places: dict[str, object], row: Row, tmp_path: Path) -> Row:
    env = {
        "HEADRACE_CACHE": "{cache}",
        "HEADRACE_STATS": "{tmp}/stats",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "{index}",
        "PIP_CONFIG_FILE": os.devnull,
        **row.env,
    }
    rubbish = tmp_path / "rubbish"
    rubbish.mkdir(mode=0o700)
    fill_with_rubbish(rubbish)
    return filled(row._replace(env=env), {**places, "tmp": tmp_path, "locked": tmp_path / "locked", "rubbish": rubbish})


def fill_with_rubbish(folder: Path) -> None:
    """What is no record of an engine, and no measurement of a machine."""
    for i, text in enumerate(("", "[]", "9" * 5000, '"x"', "{" * 100_000, '{"version": 2, "stats": {}}', '{"version": 2, "stats": null}')):
        (folder / f"{os.getpid()}-{i}.json").write_text(text)
    (folder / f"{os.getpid()}-x.json").write_bytes(bytes(range(256)))
    (folder / "1-1.json").mkdir()
    os.mkfifo(folder / f"{os.getpid()}-y.json")
    (folder / "machine.json").write_text('{"a": [1, {"b": 1e999}]}' * 3)


@pytest.mark.parametrize("row", invocations.HERE, ids=lambda row: row.words[:60] or "nothing")
def test_in_this_process(
    row: Row, places: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = conditions(places, row, tmp_path)
    assert not faults(row, run_here(row, monkeypatch, capsys))


@pytest.mark.parametrize("row", invocations.APART, ids=lambda row: row.words[:60] or "nothing")
def test_in_a_process(row: Row, places: dict[str, object], tmp_path: Path) -> None:
    row = conditions(places, row, tmp_path)
    assert not faults(row, run_apart(row))
