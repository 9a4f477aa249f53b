"""Sampling parameters advised by a model's authors."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.advised_sampling import advised_sampling
from headrace.checkpoint.load import open_checkpoint
from headrace.errors import FormatError
from tests.checkpoint.conftest import WriteGguf

ADVISED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}


def test_advised_sampling_of_a_folder(tmp_path: Path) -> None:
    assert advised_sampling(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(
        json.dumps(ADVISED | {"do_sample": True, "eos_token_id": 5, "max_length": 20})
    )
    assert advised_sampling(tmp_path) == ADVISED
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": None, "top_k": 5}))
    assert advised_sampling(tmp_path) == {"top_k": 5}


def test_advised_sampling_of_gguf(write_gguf: WriteGguf) -> None:
    assert open_checkpoint(write_gguf()).advised_sampling() == {}
    keys = {
        "temp": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "penalty_repeat": 1.1,
        "mirostat": 2,
    }
    found = open_checkpoint(
        write_gguf({f"general.sampling.{name}": value for name, value in keys.items()})
    ).advised_sampling()
    assert found == pytest.approx(ADVISED) and found.keys() == ADVISED.keys()


@pytest.mark.parametrize("value", ["warm", -1, [], {}, float("nan"), True])
def test_what_they_cannot_be(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(FormatError, match=r"generation_config.json: temperature"):
        advised_sampling(tmp_path)
