"""pull, ls, show and doctor, with the real default model."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.backend import compile_program
from headrace.checkpoint.load import open_checkpoint
from headrace.cli.main import main
from headrace.config import KvConfig
from headrace.measure.describe import TOKENIZER_BYTES
from headrace.model import trace_model
from headrace.planner.fit import RUNTIME_BYTES


def test_pull_prints_only_the_path(headrace, smollm2: Path) -> None:
    result = headrace("pull", "smollm2")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{smollm2}\n", "")


def test_ls(headrace, smollm2: Path) -> None:
    assert f"{smollm2}" in headrace("ls").stdout
    (model,) = [m for m in json.loads(headrace("ls", "--json").stdout) if m["name"] == "smollm2"]
    assert model == {"name": "smollm2", "path": str(smollm2), "bytes": smollm2.stat().st_size}


def test_ls_of_an_empty_cache_names_the_aliases(headrace, tmp_path: Path) -> None:
    env = {"HEADRACE_CACHE": str(tmp_path / "none")}
    assert "headrace pull smollm2" in headrace("ls", **env).stdout
    assert json.loads(headrace("ls", "--json", **env).stdout) == [
        {"name": "smollm2", "path": None, "bytes": None}
    ]


def test_rm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "pypi:tiny==1/a/b.gguf"
    file = tmp_path / "pypi/tiny==1/unpinned/a/b.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(2048))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert main(["ls"]) == 0 and name in capsys.readouterr().out
    assert main(["rm", name]) == 0 and capsys.readouterr().out == f"removed {name}: 2.0 kB freed\n"
    assert main(["ls"]) == 0 and name not in capsys.readouterr().out
    assert main(["rm", name]) == 3 and not list(tmp_path.iterdir())


class TestShow:
    def test_json(self, headrace, smollm2: Path) -> None:
        facts = json.loads(headrace("show", "smollm2", "--json").stdout)
        assert facts["parameters"] == 134_515_008
        assert (
            facts["layers"],
            facts["width"],
            facts["heads"],
            facts["kv_heads"],
            facts["vocabulary"],
        ) == (30, 576, 9, 3, 49152)
        assert facts["kv_bytes_per_token"] == {
            dtype: 30 * 3 * token
            for dtype, token in (
                ("bf16", 256),
                ("f16", 256),
                ("f32", 512),
                ("int8", 136),
                ("int4", 72),
                ("k8v4", 104),
            )
        }
        assert facts["kv_dtype"] == "bf16" and facts["kv_nll"]["model"] == "SmolLM2-135M"
        assert facts["kv_nll"]["percent"]["int4"] > 0
        assert facts["bytes"] == sum(facts["bytes_by_type"].values()) < smollm2.stat().st_size
        checkpoint = open_checkpoint(smollm2)
        executable = compile_program(
            "cpu",
            trace_model(checkpoint.spec, checkpoint.tensors),
            checkpoint.tensors,
            KvConfig((1,)),
            1,
        )
        assert facts["bytes_in_memory"] == executable.plan.weight_bytes  # type: ignore[attr-defined]
        assert (
            facts["fits"]["bf16"]["full_sequences"]
            == facts["fits"]["bf16"]["tokens"] // facts["context"]
        )
        assert facts["tokenizer_bytes"] == TOKENIZER_BYTES * facts["vocabulary"]
        budget = facts["memory_available"] - facts["bytes_in_memory"] - RUNTIME_BYTES
        budget -= facts["tokenizer_bytes"]
        assert facts["fits"]["bf16"]["tokens"] == budget // facts["kv_bytes_per_token"]["bf16"]

    def test_ranks(self, headrace) -> None:
        facts = json.loads(headrace("show", "smollm2", "-tp", "3", "--json").stdout)
        whole, ranks = json.loads(headrace("show", "smollm2", "--json").stdout), facts["ranks"]
        assert whole["ranks"] == [] and [rank["layers"] for rank in ranks] == [30] * 3
        assert (
            sum(rank["kv_bytes_per_token"] for rank in ranks) == whole["kv_bytes_per_token"]["bf16"]
        )
        # Each layer gathers the outputs of attention, of the gated unit and of their projections;
        # then the logits, and a token's row.
        gathered = 30 * (576 + 576 + 1536 + 576) * 2 // 3 + 49152 * 2 // 3 + 2 * 576
        assert [rank["bytes_received_decode"] for rank in ranks] == [4 * gathered] * 3

    def test_table(self, headrace, smollm2: Path) -> None:
        text = headrace("show", str(smollm2)).stdout
        assert (
            "134.5 M" in text
            and "Q4_1" in text
            and "8,192 tokens" in text
            and "23.0 kB in bf16" in text
        )
        assert "no large biases, no norm, as in SmolLM2-135M, whose NLL is below" in text
        assert re.search(r"weights in memory +\d+\.\d MB", text)
        assert re.search(r"tokenizer in memory +about 36\.9 MB", text)

    def test_speed_limits_need_a_measured_machine(
        self, headrace, smollm2: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "link.gguf").symlink_to(smollm2)
        model, env = str(tmp_path / "link.gguf"), {"HEADRACE_CACHE": str(tmp_path / "cache")}
        assert json.loads(headrace("show", model, "--json", **env).stdout)["limits"] is None
        assert "headrace doctor" in headrace("show", model, **env).stdout
        assert headrace("doctor", **env).returncode == 0
        limits = json.loads(headrace("show", model, "--json", **env).stdout)["limits"]
        assert 0 < limits["decode_at_2048"] < limits["decode_at_0"] < limits["prefill_512"]


class TestDoctor:
    def test_json(self, headrace, tmp_path: Path) -> None:
        result = headrace("doctor", "--json", "--threads", "1", HEADRACE_CACHE=str(tmp_path))
        facts = json.loads(result.stdout)
        assert result.returncode == 0 and facts["ok"] and facts["threads"] == 1
        assert (
            facts["isa"] in facts["isas"]
            and facts["bandwidth"] > 0
            and facts["cores"] <= os.cpu_count()
        )

    def test_every_instruction_set_passes(self, headrace, tmp_path: Path) -> None:
        from headrace import _native

        for isa in _native.isas():
            result = headrace("doctor", HEADRACE_ISA=isa, HEADRACE_CACHE=str(tmp_path))
            assert result.returncode == 0 and isa in result.stdout and "FAILED" not in result.stdout

    def test_doctor_finds_a_wrong_kernel(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from headrace.cli.main import main
        from headrace.measure import selftest

        right = selftest._step_logits
        monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
        monkeypatch.setattr(
            selftest,
            "_step_logits",
            lambda executable, start, rows: (
                right(executable, start, rows) * (1 + 0.1 * (rows == 40))
            ),
        )
        assert main(["doctor"]) == 1
        assert "FAILED" in capsys.readouterr().out


MIXTRAL_8X7B = {
    **{
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
    },
    **{
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    },
    **{
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "torch_dtype": "bfloat16",
    },
}


class TestShowConfigOnly:
    """A model without weights: a `config.json`, alone or in a folder."""

    def facts_of(
        self, path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any]
    ) -> dict[str, Any]:
        (path / "config.json").write_text(json.dumps(config))
        assert main(["show", str(path), "--json"]) == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    def test_moe(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The published numbers are 46.7 and 12.9 billion."""
        facts = self.facts_of(tmp_path, capsys, MIXTRAL_8X7B)
        assert (facts["parameters"], facts["active_parameters"]) == (46_702_792_704, 12_879_925_248)
        assert (facts["experts"], facts["experts_per_token"], facts["layers_with_experts"]) == (
            8,
            2,
            32,
        )
        vectors = (2 * 32 + 1) * 4096
        assert facts["bytes"] == 2 * (facts["parameters"] - vectors) + 4 * vectors
        assert (
            facts["bytes_in_format"]["Q8_0"]
            == (facts["parameters"] - vectors) // 32 * 34 + 4 * vectors
        )
        assert facts["kv_bytes_per_token"]["bf16"] == 2 * 2 * 32 * 8 * 128
        assert not facts["has_weights"] and facts["name"] == tmp_path.name

    def test_windows(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        facts = self.facts_of(
            tmp_path,
            capsys,
            MIXTRAL_8X7B
            | {
                "architectures": ["MistralForCausalLM"],
                "num_local_experts": 0,
                "sliding_window": 4096,
            },
        )
        (group,) = facts["kv_groups"]
        assert (group["layers"], group["window"]) == (32, 4096) and "experts" not in facts

    def test_moe_as_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
        assert main(["show", str(tmp_path / "config.json")]) == 0
        text = capsys.readouterr().out
        assert "absent; they would be 93.4 GB in BF16, 49.6 GB in Q8_0" in text
        assert "8 in 32 layers, 2 for each token: 12,879.9 M active parameters" in text

    def test_run_needs_weights(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_8X7B))
        assert main(["run", str(tmp_path), "hello"]) == 3
        assert "no safetensors file" in capsys.readouterr().err
