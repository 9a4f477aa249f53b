"""Servers of a tiny model, shared by tests that do not change them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM
from tests.checkpoint.conftest import write_tiny_gguf
from tests.server.running import Running, running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = write_tiny_gguf(
        tmp_path_factory.mktemp("server") / "tiny.gguf", {"llama.context_length": 4096}
    )
    return str(path)


@pytest.fixture(scope="session")
def server(model: str) -> Iterator[Running]:
    yield from running(
        model, "--max-num-seqs", "8", "--max-waiting", "16", "--threads", "1", "--kv-blocks", "64"
    )


@pytest.fixture(scope="session")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, threads=1, kv_blocks=64) as llm:
        yield llm
