"""The folder of KV blocks: a file is the block that its label names, or a miss."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CacheError
from headrace.kv import folder as folder_module
from headrace.kv.folder import BlockLabel, list_models, prune_folder, remove_model
from tests.kv.kills import MODEL, OTHER_MODEL, SIZE, content, has, kill_writers, label, opened


def file_of(path: Path, block: BlockLabel) -> Path:
    return next(path.rglob(block.name))


def test_another_process_reads_what_one_wrote(tmp_path: Path) -> None:
    writer, reader = opened(tmp_path / "kv"), opened(tmp_path / "kv")
    assert not reader.has(label(1).key, 0)
    assert writer.write(label(1), 0, content(1)) and writer.secret == reader.secret
    assert reader.has(label(1).key, 0) and not reader.has(label(1).key, 1)
    assert has(reader, label(1), 1) and has(opened(tmp_path / "kv"), label(1), 1)
    assert not opened(tmp_path / "kv", model=OTHER_MODEL).has(label(1).key, 0)


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    opened(tmp_path / "kv").write(label(1), 0, content(1))
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(CacheError, match="chmod 700"):
        opened(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="File exists"):
        opened(tmp_path / "file")
    opened(tmp_path / "own")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheError, match="another user"):
        opened(tmp_path / "own")


@pytest.mark.parametrize("part", ["key", "parent", "group", "tokens", "size", "model"])
def test_another_block_under_the_name_is_a_miss(part: str, tmp_path: Path) -> None:
    """The whole header counts, and not the name alone."""
    folder, right = opened(tmp_path / "kv"), label(1)
    others = {
        "key": right._replace(key=label(2).key),
        "parent": right._replace(parent=label(2).key),
        "group": right._replace(group=1),
        "tokens": right._replace(tokens=label(2).tokens),
    }
    home = opened(tmp_path / "kv", model=OTHER_MODEL) if part == "model" else folder
    written = content(1) if part != "size" else np.append(content(1), np.zeros(1, np.uint8))
    assert folder.write(right, 0, content(1)) and has(folder, right, 1)
    where = file_of(tmp_path / "kv", right)
    other = others.get(part, right)
    if part != "size":
        where.unlink()
    home.write(other, 0, written)
    source = max((tmp_path / "kv").rglob(other.name), key=lambda path: path.stat().st_mtime_ns)
    os.replace(source, where)
    assert not has(folder, right, 1) and not where.exists()
    assert folder.write(right, 0, content(1)) and has(folder, right, 1)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_files_are_misses(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Cut, grown, flipped, zeroed and mixed files, at any place."""
    path = tmp_path_factory.mktemp("damaged") / "kv"
    folder = opened(path)
    for number in (1, 2):
        folder.write(label(number), 0, content(number))
    file = file_of(path, label(1))
    whole = file.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["cut", "flip", "zeros", "grown", "mixed"]))
    damaged = bytearray(whole)
    match kind:
        case "cut":
            del damaged[place:]
        case "flip":
            damaged[place] ^= 1 << data.draw(st.integers(0, 7))
        case "zeros":
            damaged[place:] = bytes(len(whole) - place)
        case "grown":
            damaged += whole[: place + 1]
        case "mixed":
            damaged[place:] = file_of(path, label(2)).read_bytes()[place:]
    file.write_bytes(damaged)
    assert has(folder, label(1), 1) == (bytes(damaged) == whole)
    assert has(folder, label(2), 2)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_names_that_are_no_files_are_misses(kind: str, tmp_path: Path) -> None:
    folder = opened(tmp_path / "kv")
    folder.write(label(1), 0, content(1))
    where = file_of(tmp_path / "kv", label(1))
    os.replace(where, tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(where)
    elif kind == "folder":
        where.mkdir()
    else:
        where.symlink_to(tmp_path / "elsewhere")
    assert not has(folder, label(1), 1)
    assert not opened(tmp_path / "kv").has(label(1).key, 0)


def test_the_bound_holds_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    size = (
        file_of(tmp_path, label(0)).stat().st_size
        if opened(tmp_path / "kv").write(label(0), 0, content(0))
        else 0
    )
    folder = opened(tmp_path / "kv", 40 * size)
    folder.scan()
    now = time.time()
    for number in range(1, 40):
        folder.write(label(number), 0, content(number))
        os.utime(file_of(tmp_path, label(number)), (now - 1000 + number,) * 2)
    folder = opened(tmp_path / "kv", 40 * size)
    folder.scan()
    folder.touch([label(1).key], 1)
    for number in range(40, 60):
        folder.write(label(number), 0, content(number))
        assert folder.num_bytes <= 40 * size
        assert sum(f.stat().st_size for f in tmp_path.rglob("*-0")) == folder.num_bytes
    assert has(folder, label(1), 1) and not has(folder, label(2), 2) and has(folder, label(39), 39)


def test_the_end_of_a_text_goes_before_its_start(tmp_path: Path) -> None:
    folder = opened(tmp_path / "kv")
    for depth in range(6):
        folder.write(label(depth), depth, content(depth))
    size = file_of(tmp_path, label(0)).stat().st_size
    assert folder.prune(3 * size) == 3
    assert [has(folder, label(depth), depth) for depth in range(6)] == [True] * 3 + [False] * 3
    assert not folder.is_read_only


def test_a_bound_below_one_block_keeps_nothing(tmp_path: Path) -> None:
    folder = opened(tmp_path / "kv", SIZE)
    assert not folder.write(label(1), 0, content(1)) and not folder.is_read_only
    assert not list(tmp_path.rglob("*-0"))


def test_two_folders_see_each_others_files(tmp_path: Path) -> None:
    """Each looks at one subfolder with each write, so the bound holds for both together."""
    folders = [opened(tmp_path / "kv", 60 * 1200) for _ in range(2)]
    for number in range(600):
        folders[number % 2].write(label(number), 0, content(number))
    used = sum(file.stat().st_size for file in tmp_path.rglob("*-0"))
    assert used <= 2 * 60 * 1200


def test_a_removed_folder_is_made_again(tmp_path: Path) -> None:
    folder = opened(tmp_path / "kv")
    folder.write(label(1), 0, content(1))
    (model,) = list_models(tmp_path / "kv")
    assert (model.num_blocks, model.about["model"]) == (1, "toy")
    assert remove_model(tmp_path / "kv", model.path) == model.num_bytes > SIZE
    assert not model.path.exists() and not has(folder, label(1), 1)
    assert folder.write(label(1), 0, content(1)) and has(folder, label(1), 1)


def test_prune_of_a_folder(tmp_path: Path) -> None:
    for model in (MODEL, OTHER_MODEL):
        folder = opened(tmp_path / "kv", model=model)
        for number in range(5):
            folder.write(label(number), number, content(number))
    (first, second) = list_models(tmp_path / "kv")
    size = first.num_bytes // 5
    assert prune_folder(tmp_path / "kv", 4 * size) == 4 * size
    assert [model.num_blocks for model in list_models(tmp_path / "kv")] == [2, 2]
    assert prune_folder(tmp_path / "kv", 0) == 0 and second.num_blocks == 5


def test_parts_of_killed_processes_count_for_the_bound(tmp_path: Path) -> None:
    folder = opened(tmp_path / "kv")
    folder.write(label(1), 0, content(1))
    whole = file_of(tmp_path, label(1))
    part = whole.with_name(f".{whole.name}.1-1.unfinished")
    part.write_bytes(bytes(900))
    os.utime(part, (0, 0))
    again = opened(tmp_path / "kv", whole.stat().st_size + 100)
    again.scan()
    assert not part.exists() and has(again, label(1), 1)


def test_a_damaged_secret_is_replaced(tmp_path: Path) -> None:
    folder = opened(tmp_path / "kv")
    (tmp_path / "kv/secret").write_bytes(b"short")
    again = opened(tmp_path / "kv")
    assert len(again.secret) == 32 and again.secret != folder.secret
    assert opened(tmp_path / "kv").secret == again.secret


_FILL = """
import logging, resource, sys
from pathlib import Path
from tests.kv.kills import content, has, label, opened
logging.basicConfig(format="%(message)s")
folder = opened(Path(sys.argv[1]))
assert folder.write(label(1), 0, content(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
assert not folder.write(label(2), 0, content(2)) and folder.is_read_only
assert not folder.write(label(3), 0, content(3))
assert has(folder, label(1), 1) and not folder.has(label(2).key, 0)
"""


def test_a_full_disk_is_logged_once_and_reading_goes_on(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _FILL, str(tmp_path / "kv")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("\n") == 1 and "no more blocks are written" in run.stderr
    assert not list(tmp_path.rglob("*.unfinished"))


def test_a_killed_writer_leaves_whole_files(tmp_path: Path) -> None:
    """`make soak-kv` kills 2,000 of them."""
    assert kill_writers(tmp_path / "kv", num_kills=20) > 20


def test_a_damaged_file_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = opened(tmp_path / "kv")
    folder.write(label(1), 0, content(1))
    file_of(tmp_path, label(1)).write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING, folder_module.__name__):
        assert not has(folder, label(1), 1)
    assert "not a whole KV block" in caplog.text
