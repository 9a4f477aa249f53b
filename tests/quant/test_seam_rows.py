"""The rows of number formats in `docs/architecture.md` name exactly the files that know formats."""

import re
from pathlib import Path

import pytest

from headrace.checkpoint.gguf import TENSOR_TYPES
from headrace.quant.formats import FORMATS

ROOT = Path(__file__).parents[2]
GGUF_TYPES = [name for name in TENSOR_TYPES.values() if name in FORMATS and FORMATS[name].quantised]
GGUF_ROOMS = ("headrace/quant", "headrace/checkpoint", "headrace/convert", "csrc")


def files_of_row(title: str) -> set[str]:
    page = (ROOT / "docs/architecture.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {title}"))
    paths = re.findall(r"`([\w/]+\.(?:py|cpp|h))`", row)
    return {path if path.startswith("csrc/") else f"headrace/{path}" for path in paths}


def sources(*folders: str) -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    }


def num_types(text: str) -> int:
    """The number of GGUF types that a source names, in any case."""
    words = set(re.findall(r"[A-Z0-9_]+", text.upper()))
    return sum(name in words or f"_{name}" in words for name in GGUF_TYPES)


def test_gguf_types_are_in_the_files_of_their_row() -> None:
    # Two types can be an example, or a format that a method of folders shares.
    found = {path for path, text in sources(*GGUF_ROOMS).items() if num_types(text) > 2}
    assert found == files_of_row("number format of weights")


def test_kv_dtypes_are_in_the_files_of_their_row() -> None:
    python = {
        path
        for path, text in sources("headrace").items()
        if re.search(r'"fp8"', text) and re.search(r"KvDtype|KvFormat|FORMAT", text)
    }
    native = {path for path, text in sources("csrc").items() if re.search(r"\bKvType\b", text)}
    assert python | native == files_of_row("KV dtype")


@pytest.mark.parametrize("title", ["number format of weights", "KV dtype"])
def test_files_of_the_row_exist(title: str) -> None:
    assert all((ROOT / path).is_file() for path in files_of_row(title))
