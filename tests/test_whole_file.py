import os
from pathlib import Path

import pytest

from headrace.whole_file import UNFINISHED, remove_unfinished, replace_file, replacing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("survives", [False, True])
def test_a_file_is_replaced_whole(tmp_path: Path, survives: bool) -> None:
    path = tmp_path / "a.json"
    replace_file(path, "wäre\n", survives=survives)
    assert path.read_bytes() == "wäre\n".encode()
    with path.open("rb") as reader:
        replace_file(path, b"new", survives=survives)
        assert reader.read() == "wäre\n".encode()
    assert path.read_bytes() == b"new" and names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_the_mode_is_that_of_the_caller_less_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "a", "text", mode=mode)
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode & ~0o027


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_file_alone(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(type(error)), replacing(path) as scratch:
        scratch.write_text("half of the n")
        assert scratch.parent == tmp_path and scratch.name.endswith(UNFINISHED)
        raise error
    assert path.read_text() == "old" and names(tmp_path) == ["a"]


def test_a_name_that_cannot_be_replaced_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "a", "text")
    assert names(tmp_path) == ["a"]
    with pytest.raises(OSError):
        replace_file(tmp_path / "absent" / "a", "text")
    assert names(tmp_path) == ["a"]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path) as first:
        first.write_text("first")
        replace_file(path, "second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and names(tmp_path) == ["a"]


def test_a_durable_file_is_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "a", []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((file.name.endswith(UNFINISHED), file == tmp_path, path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(path, "text", survives=True)
    assert synced == [(True, False, False), (False, True, True)]
    replace_file(path, "text")
    assert len(synced) == 2


def test_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    killed = replacing(tmp_path / "a")
    killed.__enter__().write_text("half")
    replace_file(tmp_path / "b", "whole")
    assert len(names(tmp_path)) == 2
    remove_unfinished(tmp_path)
    assert names(tmp_path) == ["b"]
