"""Finds out which drafter a folder has, and opens it."""

import os
from pathlib import Path

from headrace.checkpoint.drafter import Drafter
from headrace.checkpoint.eagle1 import is_eagle1, open_eagle1
from headrace.checkpoint.eagle3 import open_eagle3
from headrace.checkpoint.files import find, read_json
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.safetensors import read_folder
from headrace.errors import HeadraceError, UnsupportedModelError
from headrace.model.fields import JsonFields

_KIND = "speculators_model_type"


def is_drafter(path: Path) -> bool:
    """Whether a path is a folder with a drafter over rows of a model. Raises as `read_json`."""
    file = find(path, "config.json") if os.path.isdir(path) else None
    return file is not None and bool(_kind(path, JsonFields(read_json(file), "config.json")))


def open_drafter(path: Path, target: Checkpoint) -> Drafter:
    """Open the drafter in a folder.

    Raises as `open_checkpoint`, RequestError if it belongs to another model, and
    UnsupportedModelError for a drafter of another kind.
    """
    config = JsonFields(read_json(path / "config.json"), f"{path.name}/config.json")
    kind = _kind(path, config)
    if kind == "eagle3":
        return open_eagle3(path, config, target)
    if kind == "eagle1":
        return open_eagle1(path, config, target)
    if kind == "dflash":
        raise UnsupportedModelError(
            f"{config.where}: the folder has a DFlash drafter, whose block of draft tokens is "
            "computed at once with attention in both directions; attention here is causal, so "
            "choose an EAGLE-3 drafter of the model"
        )
    raise UnsupportedModelError(
        f"{config.where}: {_KIND} is {kind[:40]!r}, and Headrace reads drafters of the kinds eagle "
        "and eagle3; choose an EAGLE-3 drafter of the model"
    )


def _kind(path: Path, config: JsonFields) -> str:
    """The kind of a drafter: eagle3, eagle1, dflash or an unknown one; empty for other models."""
    if kind := config.get(_KIND):
        return {"eagle": "eagle1"}.get(str(kind), str(kind))
    names = str(config.get("architectures")).casefold()
    if "dflash" in names or "dflash_config" in config:
        return "dflash"
    if "eagle3" in names or "draft_vocab_size" in config:
        return "eagle3"
    if config.get("model_type") == "eagle" or "eaglemodel" in names:
        return "eagle1"
    try:
        return "eagle1" if is_eagle1(read_folder(path).keys()) else ""
    except HeadraceError:  # reading the folder as a model says it better
        return ""
