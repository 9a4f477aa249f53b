"""The index of sharded safetensors files."""

import random
from functools import cache
from pathlib import Path

from safetensors.numpy import save_file

from headrace.checkpoint.safetensors import read_folder
from tests.fuzz.files import scratch, tensors
from tests.fuzz.mutate import mutate_json

_EXTRA = [
    "a.safetensors",
    "b.safetensors",
    "../a.safetensors",
    "model.safetensors.index.json",
    "a.safetensors/",
    "pipe",
    "circle",
    "folder",
]


@cache
def shards() -> tuple[Path, dict[str, dict[str, str]]]:
    """A folder with two shards and other files, and its index."""
    path, made = scratch() / "shards", tensors()
    path.mkdir()
    half = len(made) // 2
    parts = {
        "a.safetensors": dict(list(made.items())[:half]),
        "b.safetensors": dict(list(made.items())[half:]),
    }
    for name, part in parts.items():
        save_file(part, path / name)
    (path / "folder").mkdir()
    (path / "circle").symlink_to("circle")
    return path, {"weight_map": {name: shard for shard, part in parts.items() for name in part}}


def case(rng: random.Random) -> bytes:
    return mutate_json(rng, shards()[1], _EXTRA)


def run(case: bytes) -> None:
    path, _ = shards()
    (path / "model.safetensors.index.json").write_bytes(case)
    read_folder(path)
