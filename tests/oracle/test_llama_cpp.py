"""The short form of `make gguf` without llama.cpp: files by its converter, and some
rows of its logits.
"""

from pathlib import Path

import pytest

from headrace.model import FAMILIES
from tests.families import VARIANTS
from tests.llama_cpp import fixtures
from tests.llama_cpp.judge import differences, our_logits, relative_error
from tests.llama_cpp.models import CASES, NOT_CONVERTED, NOT_RUN, TOKENS, UNSAID, save_coarse


@pytest.mark.parametrize("name", fixtures.KEPT)
def test_logits_of_llama_cpp_files(name: str, tmp_path: Path) -> None:
    file, folder = fixtures.unpack(name, tmp_path), tmp_path / "folder"
    save_coarse(name, folder)
    assert differences(folder, file) == []
    logits, tolerance = our_logits(file, TOKENS[: fixtures.LENGTH], like_theirs=True)
    assert relative_error(logits[list(fixtures.ROWS)], fixtures.logits(name)) < tolerance


def test_every_architecture_has_a_llama_cpp_file() -> None:
    kept = {VARIANTS[CASES[name].variant].family for name in fixtures.KEPT}
    assert {name for name, family in FAMILIES.items() if family.gguf} <= kept


def test_llama_cpp_judged_every_variant() -> None:
    assert CASES.keys() >= VARIANTS.keys() and UNSAID.keys() <= CASES.keys()
    assert fixtures.verdicts().keys() == CASES.keys() - NOT_CONVERTED.keys() - NOT_RUN.keys()
