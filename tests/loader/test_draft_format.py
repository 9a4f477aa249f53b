"""Matrices of drafters in fewer bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.checkpoint.load import open_checkpoint
from headrace.loader.draft_format import with_format
from headrace.loader.drafts import open_draft_checkpoints
from headrace.loader.options import engine_config
from headrace.quant.formats import FORMATS, StoredTensor
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture
from tests.drafters import random_drafter, write_drafter

MATRICES = {"fuse", "head", *(f"layers.0.{part}" for part in ("q", "k", "v", "o", "gate", "up"))}
"""The matrices with whole blocks of 32 columns; the feed-forward width is 48."""


def drafter(model: Path) -> tuple[Path, Any]:
    target = open_checkpoint(model)
    made = random_drafter((target.spec, dict(target.tensors)), vocab=100)
    return write_drafter(model.with_name("drafter"), made, "authors"), target


@pytest.mark.parametrize(("choice", "max_error"), [("q4_1", 0.09), ("q8_0", 0.008)])
def test_matrices_of_a_drafter_are_encoded(
    write_gguf: Any,  # noqa: F811
    choice: Any,
    max_error: float,
) -> None:
    folder, target = drafter(write_gguf())
    options = {"proposer": "draft_model", "draft_model": str(folder), "backend": "cpu"}
    opened = {}
    for each in (choice, "file"):
        config = engine_config({**options, "draft_format": each})
        drafts = open_draft_checkpoints(config, target, target.load_tokenizer)
        opened[each] = drafts.in_format(config)
    config = engine_config({**options, "backend": "reference"})
    assert drafts.in_format(config) is drafts
    assert opened[choice].drafter and opened["file"].drafter
    own, exact = opened[choice].drafter.tensors, opened["file"].drafter.tensors
    encoded = {name for name, tensor in own.items() if tensor is not exact[name]}
    encoded &= {name for name in own if own[name].format.name == choice.upper()}
    assert encoded == MATRICES
    for name in encoded:
        values, wanted = own[name].dequantise(), exact[name].dequantise()
        assert np.sqrt(np.mean((values - wanted) ** 2)) < max_error * wanted.std()
    sizes = [each.weight_bytes("cpu", target) for each in opened.values()]
    assert sizes[0] < sizes[1]


def test_other_tensors_stay_as_they_are(write_gguf: Any) -> None:  # noqa: F811
    _, target = drafter(write_gguf())
    made = random_drafter((target.spec, dict(target.tensors)))
    assert with_format(made, "file") is made
    encoded = with_format(made, "q8_0")
    for name in set(made.tensors) - MATRICES:
        assert encoded.tensors[name] is made.tensors[name]
    assert with_format(encoded, "q4_1").tensors["head"] is encoded.tensors["head"]


def test_mixed_keeps_more_bits_of_the_head(write_gguf: Any) -> None:  # noqa: F811
    _, target = drafter(write_gguf())
    made = random_drafter((target.spec, dict(target.tensors)))
    encoded = with_format(made, "mixed").tensors
    found = {name: encoded[name].format.name for name in MATRICES}
    assert found == {name: "Q8_0" if name == "head" else "Q4_1" for name in MATRICES}


def test_chunks_of_rows_are_joined_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.loader.draft_format._CHUNK_VALUES", 64)
    from headrace.loader.draft_format import _encoded

    values = np.random.default_rng(0).normal(size=(37, 32)).astype(np.float32)
    tensor = StoredTensor.from_floats("head", values)
    got = _encoded({"head": tensor}, "Q8_0")["head"]
    assert got.format is FORMATS["Q8_0"] and np.allclose(got.dequantise(), values, atol=0.02)


@pytest.mark.parametrize("choice", ["mixed", "q4_1", "q8_0", "file"])
def test_the_format_of_drafts_changes_no_token(write_gguf: Any, choice: str) -> None:  # noqa: F811
    model = write_gguf()
    folder, _ = drafter(model)
    options: dict[str, Any] = {"max_model_len": 128, "kv_blocks": 8, "adaptive_speculation": False}
    own = {"proposer": "draft_model", "draft_model": str(folder), "draft_format": choice}
    params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
    with LLM(str(model), **options) as plain, LLM(str(model), **options, **own) as llm:
        wanted = [each.outputs for each in plain.generate(["hello", "he"], params)]
        assert [each.outputs for each in llm.generate(["hello", "he"], params)] == wanted
        assert llm.stats().drafted > 0 and llm.stats().proposer_failures == 0
