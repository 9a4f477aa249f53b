"""GGUF models in two files, of which one is changed: opened as either part and as a folder."""

import random
from functools import cache
from pathlib import Path

from headrace.checkpoint.load import open_checkpoint
from tests.checkpoint.test_split import write_parts
from tests.fuzz.files import scratch
from tests.fuzz.mutate import mutate_bytes


@cache
def parts() -> tuple[Path, tuple[bytes, ...]]:
    """The folder, and the content of its parts."""
    folder = scratch() / "split"
    return folder, tuple(path.read_bytes() for path in write_parts(folder))


def case(rng: random.Random) -> bytes:
    """The number of the changed part, and its content."""
    number = rng.randrange(len(parts()[1]))
    content = parts()[1][number]
    header = content.index(b"general.name") if number == 0 else 500
    return bytes([number]) + mutate_bytes(rng, content, header + 500)


def run(case: bytes) -> None:
    folder, contents = parts()
    paths = sorted(folder.iterdir())
    for i, (path, content) in enumerate(zip(paths, contents, strict=True)):
        path.write_bytes(case[1:] if i == case[0] else content)
    for path in (paths[case[0]], folder):
        checkpoint = open_checkpoint(path)
        for name in ("norm", "layers.0.attn_norm", "layers.1.k"):
            checkpoint.tensors[name].dequantise()
