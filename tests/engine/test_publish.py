"""The records of a running engine: their place, their times, and that no other user can read them
or cause them.
"""

import os
import tempfile
from pathlib import Path

import pytest

from headrace.engine.publish import Publisher, folder, is_private, read_file


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private folder with the file that a watching process touches."""
    path = tmp_path / "stats"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("HEADRACE_STATS", str(path))
    (path / "watch").touch()
    return path


def files(path: Path) -> dict[str, str]:
    """Return the text of each file except `watch`, by the end of its name."""
    return {
        file.name.rpartition(".")[2]: file.read_text()
        for file in path.iterdir()
        if file.name != "watch"
    }


def test_the_folder_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_STATS", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert folder() == Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert folder() == Path("/run/user/7/headrace")
    monkeypatch.setenv("HEADRACE_STATS", "/elsewhere")
    assert folder() == Path("/elsewhere")


def test_a_private_folder_belongs_to_this_user(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_private(watched)
    (watched / "watch").chmod(0o600)
    assert not is_private(watched / "watch") and not is_private(watched / "nowhere")
    (watched / "link").symlink_to(watched)
    assert not is_private(watched / "link")
    for bit in (0o040, 0o020, 0o010, 0o004, 0o002, 0o001):
        watched.chmod(0o700 | bit)
        assert not is_private(watched)
    watched.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: watched.stat().st_uid + 1)
    assert not is_private(watched)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    assert read_file(tmp_path / "file", 4) == b"abcd"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe: not a regular file"):
        read_file(tmp_path / "pipe", 4)


def test_a_record_is_written_every_quarter_of_a_second(watched: Path) -> None:
    made: list[int] = []
    publisher = Publisher(lambda with_map: {"made": made.append(1) or len(made)})  # type: ignore[func-returns-value]
    for now, number in ((0.0, 1), (0.249, 1), (0.25, 2), (0.4, 2), (0.6, 3)):
        publisher.tick(now)
        assert files(watched) == {"json": f'{{"made":{number}}}'}
    assert [file.stat().st_mode & 0o777 for file in watched.glob("*.json")] == [0o600]
    publisher.tick(0.7, last=True)
    publisher.tick(0.9)
    assert files(watched) == {"json": '{"made":4}'}
    publisher.close()
    publisher.close()
    assert files(watched) == {}


def test_records_are_written_while_the_watch_file_is_fresh(
    watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(lambda with_map: {})
    touched = (watched / "watch").stat().st_mtime
    for age, written in ((3.1, {}), (2.9, {"json": "{}"})):
        monkeypatch.setattr("headrace.engine.publish.time.time", lambda age=age: touched + age)
        publisher.tick(0.0, last=True)
        assert files(watched) == written


@pytest.mark.parametrize(
    ("text", "with_map"),
    [("", "false"), ("map", "true"), (" " * 61 + "map", "true"), (" " * 62 + "map", "false")],
)
def test_the_map_is_written_on_request(watched: Path, text: str, with_map: str) -> None:
    (watched / "watch").write_text(text)
    Publisher(lambda with_map: {"map": with_map}).tick(0.0)
    assert files(watched) == {"json": f'{{"map":{with_map}}}'}


def test_other_files_in_place_of_a_record(watched: Path, tmp_path: Path) -> None:
    """An older file is replaced as a whole, and a link is not followed."""
    publisher = Publisher(lambda with_map: {"a": [1, 2]})
    record = watched / f"{publisher._name}.json"
    record.write_text("x" * 100)
    publisher.tick(0.0)
    assert files(watched) == {"json": '{"a":[1,2]}'}
    assert record.stat().st_mode & 0o777 == 0o600
    (tmp_path / "other").write_text("mine")
    record.unlink()
    record.symlink_to(tmp_path / "other")
    publisher.tick(1.0)
    assert (tmp_path / "other").read_text() == "mine" and not record.is_symlink()


def test_each_engine_has_a_record_of_its_own(watched: Path) -> None:
    names = [Publisher(lambda with_map: {})._name.split("-") for _ in range(2)]
    assert [pid for pid, _ in names] == [str(os.getpid())] * 2 and int(names[0][1]) + 1 == int(
        names[1][1]
    )
