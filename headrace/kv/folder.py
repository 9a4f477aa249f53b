"""A folder of KV blocks, one file each, which several processes read and write.

A file takes its name by a rename when it is complete, so a process that is killed leaves no part
of a block under a block's name; what it leaves counts for the bound, and is deleted like blocks.
A reader compares each byte of the header with the header that it
expects, and the content with a checksum: whatever a file has, it is that block or a miss.
"""

import errno
import json
import logging
import os
import stat
import struct
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.errors import CacheError, RequestError
from headrace.whole_file import UNFINISHED, replacing

Bytes = NDArray[np.uint8]

KEY_BYTES = 20
_MAGIC = b"HRKV\x00\x00\x00\x01"
_HEADER = struct.Struct("<8s16sIIQ")  # magic, model, group, bytes of tokens, bytes of content
_DIGEST_BYTES = 16
_SECRET, _ABOUT = "secret", "about.json"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SECRET_BYTES = 32
_MAX_ABOUT_BYTES = 1 << 16
_DEPTH_SECONDS = 4
"""A block counts as used this many seconds before the block that it continues, so that the end
of a long text goes before its start.
"""
_KEPT_SHARE = 15 / 16
"""Share of the bound that is kept when the folder is full."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_log = logging.getLogger("headrace.kv")


class BlockLabel(NamedTuple):
    """The identity of a block within its model."""

    key: bytes
    """Hash of all tokens up to the end of the block, and of their scope."""
    parent: bytes
    """Key of the block before it, or of the scope."""
    group: int
    tokens: bytes
    """The block's own token ids, as int32."""

    @property
    def name(self) -> str:
        return block_name(self.key, self.group)


class ModelEntry(NamedTuple):
    """The files of one model in a folder."""

    path: Path
    about: dict[str, Any]
    num_blocks: int
    num_bytes: int
    last_used: float  # seconds of the epoch; 0 without blocks


class _File(NamedTuple):
    num_bytes: int
    used: float  # seconds of the epoch


def block_name(key: bytes, group: int) -> str:
    return f"{key.hex()}-{group}"


class KvFolder:
    """The blocks of one model in a folder, within a bound on the bytes of all models.

    Any thread may call it. After a write fails, the folder is only read.
    """

    def __init__(self, path: Path, model: bytes, about: dict[str, Any], max_bytes: int) -> None:
        """Open or create the folder.

        `model` is 16 bytes that two models share only if their KV has equal bits; `about` describes
        the model for `headrace cache ls`. Raises CacheError for a folder that is not the user's
        own, or that others may read.
        """
        self.path = path
        self.max_bytes = max_bytes
        self.is_read_only = False
        self._model = model
        self._home = path / model.hex()
        self._lock = Lock()
        self._files: dict[str, _File] = {}
        """The known block files of all models, by their path within the folder."""
        self._num_bytes = 0
        self._bad = set[str]()
        """Names that could not be read, and that this process takes for misses."""
        self._to_scan = deque[str]()
        open_private(path)
        try:
            self._home.mkdir(mode=0o700, exist_ok=True)
            self.secret = self._read_secret()
            self._write_about(about)
        except OSError as error:
            raise CacheError(
                f"kv_cache_dir {path}: {error.strerror}; choose a folder that you may write"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Bytes of the known block files of all models."""
        return self._num_bytes

    # Blocks

    def has(self, key: bytes, group: int) -> bool:
        """Whether a block has a file, as far as its name tells."""
        name = block_name(key, group)
        where = self._where(name)
        if where in self._files:
            return True
        if name in self._bad:
            return False
        try:
            found = os.stat(self.path / where, follow_symlinks=False)
        except OSError:
            return False
        if not stat.S_ISREG(found.st_mode):
            return False
        self._note(where, _File(found.st_size, found.st_mtime))
        return True

    def read(self, label: BlockLabel, num_bytes: int) -> Bytes | None:
        """Read a block's content; None, and the block is forgotten, if it is not there whole."""
        path = self.path / self._where(label.name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self._forget(label.name)
            return None
        try:
            content = self._content(descriptor, label, num_bytes)
        except (OSError, MemoryError):
            content = None
        finally:
            os.close(descriptor)
        if content is None:
            _log.warning("%s: not a whole KV block; it counts as a miss", path)
            self._forget(label.name)
            if not self.is_read_only:
                with suppress(OSError):
                    os.unlink(path)
        return content

    def write(self, label: BlockLabel, depth: int, content: Bytes) -> bool:
        """Write a block, `depth` blocks deep in its text, and make room for it first.

        Returns False if the folder is read-only, or smaller than the block.
        """
        header = self._header(label, content.nbytes)
        num_bytes = len(header) + content.nbytes + _DIGEST_BYTES
        if self.is_read_only or num_bytes > self.max_bytes:
            return False
        try:
            if self._num_bytes + num_bytes > self.max_bytes:
                self.prune(int(self.max_bytes * _KEPT_SHARE) - num_bytes)
            where = self._where(label.name)
            parts = [header, content.data, _digest(header, content)]
            self._put(where, parts, _used_at(depth))
            self._note(where, _File(num_bytes, _used_at(depth)))
            self._bad.discard(label.name)
            self._scan_next()
        except OSError as error:
            self._stop_writing(error)
            return False
        return True

    def touch(self, keys: Sequence[bytes], num_groups: int) -> None:
        """Say that the blocks of a text, the first block first, are used now."""
        for depth, key in enumerate(keys):
            used = _used_at(depth)
            for group in range(num_groups):
                where = self._where(block_name(key, group))
                file = self._files.get(where)
                if file is None or file.used > used - 60 or self.is_read_only:
                    continue
                with suppress(OSError):
                    os.utime(self.path / where, (used, used))
                    self._note(where, file._replace(used=used))

    # The bound

    def scan(self) -> None:
        """Find all block files of all models, and delete the least recently used ones above the
        bound.
        """
        for folder in _block_folders(self.path):
            self._scan(folder)
        if self._num_bytes > self.max_bytes:
            self.prune(int(self.max_bytes * _KEPT_SHARE))

    def prune(self, max_bytes: int) -> int:
        """Delete the least recently used files until `max_bytes` are left; returns their number."""
        with self._lock:
            oldest = sorted((file.used, where) for where, file in self._files.items())
        num_deleted = 0
        for _, where in oldest:
            if self._num_bytes <= max_bytes:
                break
            with suppress(FileNotFoundError):
                os.unlink(self.path / where)
            self._note(where, None)
            num_deleted += 1
        return num_deleted

    def _scan_next(self) -> None:
        """Look at one of the folders again, for files that other processes wrote or deleted."""
        if not self._to_scan:
            self._to_scan.extend(_block_folders(self.path))
        if self._to_scan:
            self._scan(self._to_scan.popleft())

    def _scan(self, folder: str) -> None:
        found = _scan_files(self.path, folder)
        with self._lock:
            known = [where for where in self._files if where.startswith(folder)]
        for where in known:
            if where not in found and not (self.path / where).exists():
                self._note(where, None)
        for where, file in found.items():
            self._note(where, file)

    def _note(self, where: str, file: _File | None) -> None:
        with self._lock:
            before = self._files.pop(where, None)
            self._num_bytes -= before.num_bytes if before else 0
            if file:
                self._files[where] = file
                self._num_bytes += file.num_bytes

    def _forget(self, name: str) -> None:
        self._note(self._where(name), None)
        if len(self._bad) > 1 << 16:
            self._bad.clear()
        self._bad.add(name)

    # Files

    def _where(self, name: str) -> str:
        return f"{self._model.hex()}/{name[:2]}/{name}"

    def _header(self, label: BlockLabel, num_bytes: int) -> bytes:
        sizes = label.group, len(label.tokens), num_bytes
        return _HEADER.pack(_MAGIC, self._model, *sizes) + label.key + label.parent + label.tokens

    def _content(self, descriptor: int, label: BlockLabel, num_bytes: int) -> Bytes | None:
        header = self._header(label, num_bytes)
        size = len(header) + num_bytes + _DIGEST_BYTES
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            return None
        read_header, digest = bytearray(len(header)), bytearray(_DIGEST_BYTES)
        content = np.empty(num_bytes, np.uint8)
        parts = [memoryview(read_header), content.data, memoryview(digest)]
        if not _read_all(descriptor, parts) or bytes(read_header) != header:
            return None
        return content if bytes(digest) == _digest(header, content) else None

    def _put(self, where: str, parts: Sequence[Any], used: float | None = None) -> None:
        """Write a file whole, or not at all."""
        with replacing(self.path / where) as scratch:
            try:
                descriptor = os.open(scratch, _NEW, 0o600)
            except FileNotFoundError:  # a new folder, or one that was removed
                scratch.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(scratch, _NEW, 0o600)
            try:
                _write_all(descriptor, parts)
                if used is not None:
                    os.utime(descriptor, (used, used))
            finally:
                os.close(descriptor)

    def _stop_writing(self, error: OSError) -> None:
        self.is_read_only = True
        advice = "free some space" if error.errno in _FULL else "check the folder"
        _log.warning(
            "kv_cache_dir %s: %s; no more blocks are written until a restart; %s",
            self.path,
            error.strerror or error,
            advice,
        )

    def _read_secret(self) -> bytes:
        """The key of the hashes in names, the same for all processes of the folder."""
        path = self.path / _SECRET
        with suppress(FileNotFoundError):
            secret = path.read_bytes()
            if len(secret) == _SECRET_BYTES:
                return secret
            path.unlink(missing_ok=True)  # a damaged secret: all blocks are misses
        with tempfile.NamedTemporaryFile(dir=self.path) as own:
            own.write(os.urandom(_SECRET_BYTES))
            own.flush()
            with suppress(FileExistsError):
                os.link(own.name, path)  # the first process wins
        return path.read_bytes()

    def _write_about(self, about: dict[str, Any]) -> None:
        if _read_about(self._home) != about:
            text = json.dumps(about).encode()
            self._put(f"{self._model.hex()}/{_ABOUT}", [text])


# The folder as a whole


def open_private(path: Path) -> None:
    """Create a folder for this user alone, or check that it is one. Raises CacheError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(
            f"kv_cache_dir {path}: {error.strerror}; choose a folder that you may write"
        ) from error
    except ValueError as error:
        raise RequestError(f"kv_cache_dir {str(path)[:80]!r}: {error}; choose a folder") from error
    check_private(path)


def check_private(path: Path) -> None:
    """Raise CacheError if a folder is not this user's own, or if others may read it."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise CacheError(f"kv_cache_dir {path}: {error.strerror}; choose another folder") from error
    if found.st_uid != os.geteuid():
        raise CacheError(
            f"kv_cache_dir {path} belongs to another user, and it would hold your prompts; "
            "choose a folder of your own"
        )
    if found.st_mode & 0o077:
        raise CacheError(
            f"kv_cache_dir {path}: other users may enter it, and its blocks hold your prompts; "
            "choose a new folder, or take their rights with chmod 700"
        )


def list_models(path: Path) -> list[ModelEntry]:
    """The models with blocks in a folder, the last used first."""
    models = []
    for home in _model_folders(path):
        files = [
            file
            for folder in _block_folders(path, [home])
            for where, file in _scan_files(path, folder).items()
            if not where.endswith(UNFINISHED)
        ]
        models.append(
            ModelEntry(
                path=path / home,
                about=_read_about(path / home),
                num_blocks=len(files),
                num_bytes=sum(file.num_bytes for file in files),
                last_used=max((file.used for file in files), default=0.0),
            )
        )
    return sorted(models, key=lambda model: -model.last_used)


def remove_model(path: Path, home: Path) -> int:
    """Delete the files of a model; returns their bytes. Running processes lose only hits."""
    num_bytes = 0
    for folder in _block_folders(path, [home.name]):
        for where, file in _scan_files(path, folder).items():
            with suppress(FileNotFoundError):
                os.unlink(path / where)
                num_bytes += file.num_bytes
        with suppress(OSError):  # not empty: a process writes there now
            os.rmdir(path / folder)
    with suppress(OSError):
        os.unlink(home / _ABOUT)
        os.rmdir(home)
    return num_bytes


def prune_folder(path: Path, max_bytes: int) -> int:
    """Delete the least recently used blocks of all models until `max_bytes` are left; returns the
    bytes that are left.
    """
    files = {
        where: file
        for folder in _block_folders(path)
        for where, file in _scan_files(path, folder).items()
    }
    num_bytes = sum(file.num_bytes for file in files.values())
    for where in sorted(files, key=lambda where: files[where].used):
        if num_bytes <= max_bytes:
            break
        with suppress(FileNotFoundError):
            os.unlink(path / where)
        num_bytes -= files[where].num_bytes
    return num_bytes


def _model_folders(path: Path) -> list[str]:
    with suppress(OSError):
        return [
            entry.name
            for entry in os.scandir(path)
            if len(entry.name) == 32 and entry.is_dir(follow_symlinks=False)
        ]
    return []


def _block_folders(path: Path, homes: Sequence[str] | None = None) -> Iterator[str]:
    """The folders with block files, within `path`."""
    for home in _model_folders(path) if homes is None else homes:
        with suppress(OSError):
            for entry in os.scandir(path / home):
                if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False):
                    yield f"{home}/{entry.name}"


def _scan_files(path: Path, folder: str) -> dict[str, _File]:
    found = {}
    with suppress(OSError):
        for entry in os.scandir(path / folder):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found[f"{folder}/{entry.name}"] = _File(status.st_size, status.st_mtime)
    return found


def _read_about(home: Path) -> dict[str, Any]:
    try:
        with open(home / _ABOUT, "rb") as file:
            about = json.loads(file.read(_MAX_ABOUT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _used_at(depth: int) -> float:
    return time.time() - _DEPTH_SECONDS * depth


def _digest(header: bytes, content: Bytes) -> bytes:
    digest = xxhash.xxh3_128(header)
    digest.update(content.data)
    return digest.digest()


def _read_all(descriptor: int, parts: Sequence[memoryview]) -> bool:
    """Fill the parts from a file; False if it ends before."""
    for part in parts:
        done = 0
        while done < len(part):
            num_read = os.readv(descriptor, [part[done:]])
            if not num_read:
                return False
            done += num_read
    return True


def _write_all(descriptor: int, parts: Sequence[Any]) -> None:
    for part in parts:
        view, done = memoryview(part), 0
        while done < len(view):
            done += os.write(descriptor, view[done:])
