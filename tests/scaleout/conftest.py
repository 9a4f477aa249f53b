"""Tiny models for workers: a fast one, and one with steps slow enough to end a worker in the middle
of a response.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.conftest import SHAPE, write_tiny_gguf

CHANGE: dict[str, Any] = {
    "llama.context_length": 4096,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}
_WIDE = 16384
"""Columns of a feed-forward layer: each step reads 25 MB of weights."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = write_tiny_gguf(tmp_path_factory.mktemp("route") / "tiny.gguf", CHANGE)
    return str(path)


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng, dim = np.random.default_rng(1), SHAPE["dim"]
    shapes = {"gate": (_WIDE, dim), "up": (_WIDE, dim), "down": (dim, _WIDE)}
    names = [
        (f"blk.{layer}.ffn_{name}.weight", shape)
        for layer in range(SHAPE["layers"])
        for name, shape in shapes.items()
    ]
    weights = {name: (0.05 * rng.normal(size=shape)).astype(np.float32) for name, shape in names}
    change = CHANGE | {"llama.feed_forward_length": _WIDE}
    path: Path = write_tiny_gguf(tmp_path_factory.mktemp("route") / "slow.gguf", change, weights)
    return str(path)
