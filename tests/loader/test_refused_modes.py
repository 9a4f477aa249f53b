"""Modes and options that do not combine are refused at start-up."""

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.checkpoint.fingerprint import fingerprint
from headrace.checkpoint.load import open_checkpoint
from headrace.errors import HeadraceError
from headrace.loader.calibration_file import write_calibration
from tests.checkpoint.conftest import write_tiny_gguf
from tests.composability import REFUSALS, Refusal
from tests.families import save_model


@pytest.mark.parametrize(
    "refusal", REFUSALS, ids=lambda refusal: f"{refusal.mode} {refusal.options}"
)
def test_modes_and_options_that_do_not_combine_are_refused(
    refusal: Refusal, tmp_path: Path
) -> None:
    model = write_tiny_gguf(tmp_path / "model.gguf")
    value: Any = 1
    if refusal.mode == "skip_zeros":
        model, value = tmp_path / "opt", True
        save_model("opt", model)
    elif refusal.mode == "early_exit":
        checkpoint = open_checkpoint(model)
        facts = {"layers": 1, "min_margin": 0.1}
        value = str(tmp_path / "exit.json")
        mark = fingerprint(checkpoint, checkpoint.load_tokenizer())
        write_calibration(Path(value), "early_exit", mark, facts)
    options: dict[str, Any] = {refusal.mode: value, **refusal.options}
    with pytest.raises(HeadraceError) as error:
        LLM(str(model), **{"backend": "cpu", "max_model_len": 128, "kv_blocks": 8, **options})
    assert refusal.message in str(error.value)
