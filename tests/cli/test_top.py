"""`headrace top`: engines are seen while `top` looks, and only then."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from headrace.cli.engine_records import EngineWatcher
from headrace.cli.main import main
from headrace.cli.top_screen import bar, duration, screen, sparkline
from headrace.cli.top_use import UseReader
from headrace.engine import publish
from headrace.engine.engine import Engine
from headrace.errors import RequestError
from headrace.planner.hardware import Machine
from headrace.sampling_params import SamplingParams
from headrace.whole_file import UNFINISHED
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture
from tests.engine.toy import toy_engine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of records for this test."""
    path = tmp_path / "stats"
    monkeypatch.setenv("HEADRACE_STATS", str(path))
    return path


def busy_engine(requests: int = 2, **options: Any) -> Engine:
    engine = toy_engine(**options)
    for i in range(requests):
        engine.add_request([1] * (3 + i % 9), SamplingParams(max_tokens=20, seed=i))
    return engine


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


class TestEngineWritesRecords:
    def test_no_record_without_a_watcher(self, folder: Path) -> None:
        engine = busy_engine()
        for _ in range(3):
            engine.step()
        assert not folder.exists()
        folder.mkdir(mode=0o700)
        engine.step()
        assert files(folder) == []

    def test_record_appears_and_is_removed(self, folder: Path) -> None:
        watcher, engine = EngineWatcher(), busy_engine()
        engine.step()
        (record,) = watcher.read()
        assert record["pid"] == os.getpid() and record["stats"].running == 2 and "map" not in record
        assert [(line["prompt"], line["output"], line["state"]) for line in record["seqs"]] == [
            (3, 1, "decode"),
            (4, 1, "decode"),
        ]
        (file,) = folder.glob("*.json")
        assert file.stat().st_mode & 0o777 == 0o600
        engine.close()
        assert files(folder) == ["watch"]

    def test_min_interval_of_records(self, folder: Path) -> None:
        EngineWatcher()
        engine = busy_engine()
        engine.step()
        (file,) = folder.glob("*.json")
        before = file.read_text()
        engine._publisher._next = float("inf")
        engine.step()
        assert file.read_text() == before

    def test_last_record_of_an_engine_is_inactive(self, folder: Path) -> None:
        watcher, engine = EngineWatcher(), busy_engine()
        while engine.has_work:
            engine.step()
            engine._publisher._next = float("inf")
        (record,) = watcher.read()
        assert (record["stats"].running, record["stats"].finished, record["seqs"]) == (0, 2, [])

    def test_old_watch_file_is_ignored(self, folder: Path) -> None:
        EngineWatcher()
        os.utime(folder / "watch", (time.time() - 2 * publish.FRESH,) * 2)
        busy_engine().step()
        assert files(folder) == ["watch"]

    def test_folder_open_to_others_is_ignored(self, folder: Path) -> None:
        EngineWatcher()
        folder.chmod(0o777)
        busy_engine().step()
        assert files(folder) == ["watch"]
        with pytest.raises(RequestError, match="HEADRACE_STATS"):
            EngineWatcher()

    def test_unwritable_folder_is_ignored(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        EngineWatcher()

        def refuse(*args: object) -> int:
            raise OSError("no space")

        monkeypatch.setattr("headrace.engine.publish.os.open", refuse)
        engine = busy_engine()
        engine.step()
        assert engine.stats().steps == 1 and files(folder) == ["watch"]

    @pytest.mark.parametrize(("most_blocks", "with_map"), [(63, False), (64, True)])
    def test_record_is_bounded(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, most_blocks: int, with_map: bool
    ) -> None:
        """The number of sequences, running or waiting, and the 64 blocks of the map are bounded."""
        monkeypatch.setattr("headrace.engine.engine.MAX_SEQUENCES", 5)
        monkeypatch.setattr("headrace.engine.engine.MAX_BLOCKS", most_blocks)
        watcher, engine = EngineWatcher(with_map=True), busy_engine(9, max_num_seqs=3)
        engine.step()
        (record,) = watcher.read()
        assert (
            len(record["seqs"]) == 5
            and record["sequences_left_off"] == 4
            and ("map" in record) is with_map
        )


WRONG = (
    ('"running": 0', '"running": "0"'),
    ('"running": 0', '"running": null'),
    ('"running": 0', '"running": true'),
    ('"steps": 0', '"steps": -1'),
    ('"steps": 0', '"steps": 1e999'),
    ('"steps": 0', f'"steps": {"9" * 4000}'),
    ('"rows_per_second": 0.0', '"rows_per_second": NaN'),
    ('"kv": [[', '"kv": [["x", '),
    ('"kv": [[', '"kv": 5, "x": [['),
    ('"drafts": {', '"drafts": {"suffix": [1, 2, "3", 4], '),
    ('"expert_loads": [', '"expert_loads": [3, '),
    ('"expert_loads": [', '"expert_loads": [[1, -1], '),
    ('"max_num_seqs": 64', '"max_num_seqs": "many"'),
    ('"history": [', '"history": [[], '),
    ('"seqs": [', '"seqs": [3, '),
    ('"pid": ', '"pid": -'),
    ('"model": "', '"model": 5, "x": "'),
    ('"groups": [[1, 0, 64', '"groups": [[1, 0, 1000000000'),
    ('"block_size": ', '"block_size": -'),
)
"""Replacements of text that make a valid record invalid."""


class TestReadRecords:
    def test_block_map_of_a_record(self, folder: Path) -> None:
        watcher, engine = EngineWatcher(with_map=True), busy_engine()
        engine.step()
        (record,) = watcher.read()
        blocks = record["map"]
        assert blocks == engine.block_map() and blocks.groups[0].num_blocks == 64

    def test_records_of_dead_processes_are_deleted(self, folder: Path) -> None:
        watcher, engine = EngineWatcher(), busy_engine()
        engine.step()
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        (file,) = folder.glob("*.json")
        dead = folder / f"{process.pid}-0.json"
        dead.write_text(file.read_text())
        half = folder / f".{process.pid}-0.json.{process.pid}-0{UNFINISHED}"
        half.write_text("half a rec")
        assert len(watcher.read()) == 2  # it may be of a process that we cannot see: a container's
        for path in (file, dead, half):
            os.utime(path, (time.time() - 60,) * 2)
        assert len(watcher.read()) == 1 and files(folder) == sorted([file.name, "watch"])

    def test_invalid_records_are_ignored(self, folder: Path) -> None:
        watcher = EngineWatcher()
        good = json.dumps(busy_engine()._record(True))
        rubbish = [
            "",
            "[]",
            '{"version": 99}',
            '{"version": 3, "stats": {}}',
            "\xff",
            '{"version": 3, "stats": 3}',
            "[" * 100_000,
            "9" * 5000,
        ]
        rubbish += [good.replace(old, new) for old, new in WRONG]
        assert [old for old, _ in WRONG if old not in good] == []
        for i, text in enumerate(rubbish):
            (folder / f"{os.getpid()}-{i}.json").write_text(text)
        os.mkfifo(folder / f"{os.getpid()}-pipe.json")
        (folder / f"{os.getpid()}-huge.json").write_bytes(bytes(20 << 20))
        (folder / "notes.json").write_text("{}")
        assert watcher.read() == []

    def test_engine_ignores_a_pipe(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        os.mkfifo(folder / publish.WATCH)
        busy_engine().step()
        assert files(folder) == [publish.WATCH]

    def test_full_disk_leaves_no_partial_record(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*args: object, **options: object) -> None:
            raise OSError("no space")

        EngineWatcher()
        monkeypatch.setattr("headrace.whole_file.os.replace", full)
        busy_engine().step()
        assert files(folder) == [publish.WATCH]

    def test_watch_one_process(self, folder: Path) -> None:
        engine = busy_engine()
        EngineWatcher()
        engine.step()
        assert (
            len(EngineWatcher(os.getpid()).read()) == 1
            and EngineWatcher(os.getpid() + 1).read() == []
        )


def test_use_of_the_machine(
    folder: Path,
    write_gguf: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By all steps since the start, then by the last ones; none without the model's files."""
    machine = Machine("a processor", "an isa", 1, 1e9, {"int8": 1e9, "bf16": 1e9, "f32": 1e9})
    monkeypatch.setattr("headrace.planner.hardware.cached_machine", lambda *_: machine)
    watcher, engine, reader = EngineWatcher(), busy_engine(threads=1, backend="cpu"), UseReader()
    engine.path = str(write_gguf())
    for steps in (1, 3):
        for _ in range(steps):
            engine._publisher._next = 0.0
            engine.step()
        (record,) = watcher.read()
        uses = reader.read(record)
    assert {kind: use.steps for kind, use in uses.items()} == {"decode_steps": 3}
    use = uses["decode_steps"]
    assert use.mbu["measured"] == pytest.approx(use.bytes / use.seconds / 1e9) and use.predicted

    console = Console(width=120, record=True, file=StringIO())
    console.print(screen([record], record["time"], 120, uses=uses))
    (line,) = [line for line in console.export_text().splitlines() if line.startswith("decode")]
    assert "MBU" in line and "MFU" in line and "predicted" in line

    # In a lossy mode the meter counts the bytes of its program.
    modes = {"attention_window": 1, "attention_sinks": 0}
    windowed = UseReader().read(record | {"config": record["config"] | {"modes": modes}})
    assert windowed["decode_steps"].bytes < UseReader().read(record)["decode_steps"].bytes
    assert UseReader().read(record | {"config": record["config"] | {"modes": {"no": 1}}}) == {}

    engine.path = "gone.gguf"
    assert UseReader().read(record | {"path": "gone.gguf"}) == {}


class TestTopScreen:
    def shown(self, records: list[dict[str, Any]], **options: int) -> str:
        console = Console(
            width=options.get("width", 100), record=True, file=StringIO(), force_terminal=True
        )
        console.print(screen(records, records[0]["time"], **options))
        return console.export_text()

    def records(self, folder: Path, **options: Any) -> list[dict[str, Any]]:
        watcher = EngineWatcher()
        for _ in range(options.pop("engines", 1)):
            engine = busy_engine(**options)
            engine.name = "models/mill\x1b[31m"
            engine.step()
        return watcher.read()

    def test_screen_of_one_engine(self, folder: Path) -> None:
        text = self.shown(self.records(folder))
        for words in (
            "process",
            "tokens/s",
            "KV in use",
            "3 % ",
            "2 of 64 blocks",
            "decode",
            "2 of 64 sequences; 0 waiting",
            "0 preemptions",
        ):
            assert words in text, words
        assert "\x1b" not in text

    @pytest.mark.parametrize("width", [60, 80, 100, 200])
    def test_lines_fit(self, folder: Path, width: int) -> None:
        text = self.shown(self.records(folder), width=width)
        assert max(map(len, text.splitlines())) <= width
        if width >= 80:
            assert len(text.splitlines()) < 20 and "…" not in text

    def test_several_engines_and_many_sequences(self, folder: Path) -> None:
        text = self.shown(self.records(folder, engines=2, requests=12), rows=5)
        assert text.count(str(os.getpid())) == 3 and "and 7 more" in text

    def test_each_kv_group_has_a_line(self, folder: Path) -> None:
        text = self.shown(self.records(folder, windows=(0, 5)), width=120)
        assert "KV, all tokens" in text and "KV, last 5" in text and "KV in use" not in text

    def test_sparkline_duration_and_bar(self) -> None:
        assert (
            sparkline([0, 1, 2, 4]) == "▁▃▅█" and sparkline([0, 0]) == "▁▁" and sparkline([]) == ""
        )
        assert [duration(s) for s in (4.21, 187, 7387)] == ["4.2 s", "3:07", "2:03:07"]
        assert [bar(share, 8).plain.rstrip() for share in (0, 0.5, 0.53, 1, 7)] == [
            "",
            "████",
            "████▎",
            "████████",
            "████████",
        ]


Ask = Callable[..., tuple[int, str, str]]


class TestTopCommand:
    @pytest.fixture
    def ask(
        self, capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Ask:
        """Runs the command while an engine works: whenever it sleeps, the engine takes a step."""
        engine = busy_engine(40, max_num_seqs=4)
        sleep = time.sleep
        monkeypatch.setattr(
            "headrace.cli.engine_records.time.sleep",
            lambda seconds: (engine.step(), sleep(seconds)),
        )

        def run(*words: str) -> tuple[int, str, str]:
            code = main(["top", *words])
            return code, *capsys.readouterr()

        return run

    def test_once(self, ask: Ask) -> None:
        code, out, err = ask("--once")
        assert (
            code == 0 and "KV in use" in out and "waiting" in out and not err and "\x1b" not in out
        )

    def test_json(self, ask: Ask) -> None:
        code, out, _ = ask("--json", str(os.getpid()))
        (record,) = json.loads(out)
        assert (
            code == 0
            and record["stats"]["kv"][0]["blocks_total"] == 64
            and 0 < record["stats"]["waste"] < 1
        )
        assert len(record["history"]) == 60 and len(record["seqs"]) > 4

    def test_map(self, ask: Ask, tmp_path: Path) -> None:
        code, out, _ = ask("--map", str(tmp_path / "map.svg"))
        assert code == 0 and "map.svg" in out
        assert "64 blocks" in (tmp_path / "map.svg").read_text()
        ElementTree.parse(tmp_path / "map.svg")

    def test_no_engine(
        self, capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("headrace.cli.engine_records._MAX_WAIT", 0.2)
        assert main(["top", "--once"]) == 1
        assert "no engine of yours is running" in capsys.readouterr().err
        assert main(["top", "--map", "x.svg"]) == 1
        assert "no engine of yours is running" in capsys.readouterr().err

    def test_bad_arguments(
        self, capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
    ) -> None:
        assert main(["top", "--map", str(tmp_path / "none" / "a.svg")]) == 2
        assert "name a file in a folder that exists" in capsys.readouterr().err
        assert main(["top", "smollm2"]) == 2
        assert "PID: 'smollm2' is not a whole number from 1" in capsys.readouterr().err


def test_top_of_another_process(headrace, smollm2: Path, folder: Path) -> None:
    code = "from headrace import LLM, SamplingParams as P\n" + (
        f"LLM({str(smollm2)!r}, max_model_len=2048).generate(['The mill'] * 4, "
        "P(max_tokens=1500, ignore_eos=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        for _ in range(60):
            result = headrace("top", "--json", str(process.pid))
            if result.returncode == 0 and json.loads(result.stdout):
                break
        (record,) = json.loads(result.stdout)
        assert (
            record["pid"] == process.pid
            and record["stats"]["running"] == 4
            and record["config"]["backend"] == "cpu"
        )
    finally:
        process.kill()
        process.wait()
