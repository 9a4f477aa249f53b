"""`kv_cache_dir` of `LLM`: its options, what other KV is, and `headrace cache`."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.cli.main import main
from headrace.errors import CacheError, RequestError
from headrace.loader.options import engine_config
from tests.checkpoint.conftest import tensors, write_tiny_gguf

PROMPT = {"prompt_token_ids": [3 + i % 50 for i in range(100)]}
PARAMS = SamplingParams(temperature=0, max_tokens=3, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_tiny_gguf(path, {"llama.context_length": 256})


def cached(model: Path, folder: Path, **options: Any) -> int:
    """Generate with a folder, compare with a run without, and return the cached tokens."""
    shape: dict[str, Any] = {"backend": "cpu", "kv_blocks": 16, **options}
    with LLM(model, **shape) as llm:
        (expected,) = llm.generate(PROMPT, PARAMS)  # type: ignore[arg-type]
    with LLM(model, kv_cache_dir=str(folder), **shape) as llm:
        (result,) = llm.generate(PROMPT, PARAMS)  # type: ignore[arg-type]
        assert llm.stats().disk_loaded_blocks == result.cached_tokens // 32
    assert result.outputs[0].token_ids == expected.outputs[0].token_ids
    assert result.outputs[0].logprobs == expected.outputs[0].logprobs
    return result.cached_tokens


def test_kv_of_other_options_is_a_miss(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    others: list[dict[str, Any]] = [
        {"kv_dtype": "int8"},
        {"activations": "f32"},
        {"attention_window": 64},
        {"rope_theta": 5000.0},
    ]
    for num_cached in (0, 96):
        assert cached(model, folder) == num_cached
        assert cached(model, folder, threads=2, max_num_seqs=3, kv_blocks=20) == 96
        for options in others:
            assert cached(model, folder, **options) == num_cached, options


def test_kv_of_other_weights_is_a_miss(model: Path, tmp_path: Path) -> None:
    """One number of one matrix differs, in none of the rows that a fingerprint reads."""
    cached(model, tmp_path / "kv")
    name = "blk.1.attn_q.weight"
    weights = {name: tensors(_vocab_size(model))[name].copy()}
    weights[name][len(weights[name]) // 2 + 1, 0] += np.float32(0.5)
    other = write_tiny_gguf(tmp_path / "other.gguf", {"llama.context_length": 256}, weights)
    assert cached(other, tmp_path / "kv") == 0
    same = write_tiny_gguf(tmp_path / "same.gguf", {"llama.context_length": 256})
    assert cached(same, tmp_path / "kv") == 96


def _vocab_size(model: Path) -> int:
    with LLM(model, backend="cpu", kv_blocks=16) as llm:
        return llm.spec.vocab_size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache": False}, "prefix_cache"),
        ({"backend": "reference"}, "not for the backend reference"),
        ({"tensor_parallel_size": 2}, "not for 2 processes"),
        ({"kv_cache_dir_bytes": 5}, "kv_cache_dir_bytes"),
    ],
)
def test_refused_options(
    options: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    shape: dict[str, Any] = {"backend": "cpu", "kv_blocks": 16, **options}
    with pytest.raises(RequestError, match=message):
        LLM(model, kv_cache_dir=str(tmp_path / "kv"), **shape)
    assert not (tmp_path / "kv").exists()


def test_refused_folders(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir(mode=0o755)
    for name, message in (("file", "File exists"), ("open", "other users"), ("a\0b", "null")):
        with pytest.raises((CacheError, RequestError), match=message):
            LLM(model, backend="cpu", kv_blocks=16, kv_cache_dir=str(tmp_path / name))
    with pytest.raises(RequestError, match="kv_cache_dir"):
        engine_config({"kv_cache_dir": 5})


def test_cache_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kv"
    cached(model, folder)
    cached(model, folder, kv_dtype="int8")

    def listed() -> list[dict[str, Any]]:
        assert main(["cache", "ls", str(folder), "--json"]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    before = listed()
    assert [entry["kv_dtype"] for entry in before] == ["int8", "bf16"]
    assert [entry["blocks"] for entry in before] == [3, 3]
    assert main(["cache", "ls", str(folder)]) == 0
    table = capsys.readouterr().out
    assert all(entry["id"][:8] in table for entry in before) and str(model) in table

    for path in (folder / before[1]["id"]).rglob("*-0"):
        os.utime(path, (0, 0))
    size = before[0]["bytes"] // 3
    assert main(["cache", "prune", str(folder), "--bytes", str(before[0]["bytes"] - size)]) == 0
    capsys.readouterr()
    assert [entry["blocks"] for entry in listed()] == [2, 0]
    assert main(["cache", "rm", str(folder), before[1]["id"][:8]]) == 0
    capsys.readouterr()
    assert [entry["id"] for entry in listed()] == [before[0]["id"]]
    assert main(["cache", "rm", str(folder), "zz"]) == 2
    assert main(["cache", "rm", str(folder), "all"]) == 0
    capsys.readouterr()
    assert listed() == []
    assert cached(model, folder) == 0 and cached(model, folder) == 96
