"""The rounding of int4 keys: measured once for a model, and kept."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import EngineConfig, KeyRounding
from headrace.loader import key_rounding
from headrace.loader.key_rounding import key_rounding_of, rounding_digest

INT4 = EngineConfig(kv_dtype="int4", threads=1)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(resolve("smollm2"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(key_rounding, "_TOKENS", 128)
    yield tmp_path / "key_rounding"


def test_int4_keys_of_a_model_are_measured_once(checkpoint: Checkpoint, folder: Path) -> None:
    measured = key_rounding_of(INT4, checkpoint)
    assert [each.layer for each in measured] == list(range(30))
    assert all(each.feedback.shape == (3, 64, 64) for each in measured)
    (file,) = folder.iterdir()
    time = file.stat().st_mtime_ns

    again = key_rounding_of(INT4, checkpoint)
    assert rounding_digest(again) == rounding_digest(measured)
    assert file.stat().st_mtime_ns == time
    changed = KeyRounding(0, measured[0].centre + 1, measured[0].feedback)
    assert rounding_digest([changed, *measured[1:]]) != rounding_digest(measured)

    file.write_bytes(file.read_bytes()[:1000])
    whole = key_rounding_of(INT4, checkpoint)
    assert rounding_digest(whole) == rounding_digest(measured)
    assert file.stat().st_size > 1000


def test_other_formats_have_no_key_rounding(checkpoint: Checkpoint, folder: Path) -> None:
    for dtype in ("bf16", "int8", "k8v4"):
        config: Any = {"kv_dtype": dtype}
        assert key_rounding_of(EngineConfig(**config), checkpoint) == ()
    assert not folder.exists()


def test_key_rounding_in_a_folder_that_cannot_be_written(
    checkpoint: Checkpoint, folder: Path
) -> None:
    folder.write_text("in the way")
    assert len(key_rounding_of(INT4, checkpoint)) == 30


def test_centres_are_zero_if_scores_meet_constants(checkpoint: Checkpoint, folder: Path) -> None:
    capped = replace(checkpoint, spec=replace(checkpoint.spec, attention_softcap=50.0))
    rounding = key_rounding_of(INT4, capped)
    assert len(rounding) == 30
    assert all((each.centre == 0).all() and np.abs(each.feedback).max() > 0 for each in rounding)


def test_int4_engine_uses_the_rounding(folder: Path) -> None:
    model = resolve("smollm2")
    options: dict[str, Any] = {"backend": "cpu", "threads": 1, "kv_blocks": 16}
    with LLM(str(model), kv_dtype="int4", max_model_len=256, **options) as llm:
        (file,) = folder.iterdir()
        text = llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))[0]
        assert "Paris" in text.outputs[0].text
    with np.load(file) as arrays:
        broken = {name: np.array(arrays[name]) for name in arrays}
    for name in broken:
        if name.startswith("feedback"):
            broken[name] = 30 * np.triu(np.ones_like(broken[name]), 1)
    np.savez(file, **broken)  # type: ignore[arg-type]
    with LLM(str(model), kv_dtype="int4", max_model_len=256, **options) as llm:
        other = llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))[0]
        assert other.outputs[0].text != text.outputs[0].text
