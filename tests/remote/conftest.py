"""A tiny model for engine processes."""

from pathlib import Path

import pytest

from tests.checkpoint.conftest import write_tiny_gguf


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = write_tiny_gguf(
        tmp_path_factory.mktemp("remote") / "tiny.gguf", {"llama.context_length": 4096}
    )
    return str(path)
