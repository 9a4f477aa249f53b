"""A tiny model, and workers of it behind a frontend."""

from pathlib import Path

import pytest

from tests.checkpoint.conftest import write_tiny_gguf


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    change = {"llama.context_length": 4096, "tokenizer.chat_template": template}
    path: Path = write_tiny_gguf(tmp_path_factory.mktemp("route") / "tiny.gguf", change)
    return str(path)
