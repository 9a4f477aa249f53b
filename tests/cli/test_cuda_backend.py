"""The GPU backend on the command line, in the interpreter; and a machine without a GPU, which
imports no module of it.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from headrace.cli.main import main
from headrace.measure.selftest import Check
from headrace.planner.gpu import Gpu, GpuHost
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000, 132, (12, 8))
INTERPRETED = "the kernels of backend 'cuda' are interpreted"


@pytest.fixture
def model(write_gguf: Any) -> str:  # noqa: F811
    path: Path = write_gguf()
    return str(path)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever this machine has; and no figures but its own."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "headrace.planner.gpu.find_gpu", lambda *root: (None, "no driver: use the cpu backend")
    )


def test_run_with_interpreted_kernels(headrace: Any, model: str) -> None:
    words = (
        "run",
        model,
        "Hi",
        "--raw",
        "--max-tokens",
        "2",
        "--temperature",
        "0",
        "--quiet",
        "--json",
    )
    answers = [
        headrace(*words, "--backend", backend, TRITON_INTERPRET="1")
        for backend in ("cuda", "reference")
    ]
    assert [answer.returncode for answer in answers] == [0, 0]
    said, tokens = (
        answers[0].stderr.splitlines(),
        [json.loads(answer.stdout)["token_ids"] for answer in answers],
    )
    assert len(said) == 1 and INTERPRETED in said[0]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 2


def test_cuda_backend_without_a_gpu(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    short = {"bench": ("--pp", "4", "--tg", "4", "--depth", "0"), "calibrate": ("--tokens", "16")}
    for words in (
        ["run", model, "Hi"],
        ["show", model],
        ["profile", model],
        ["bench", "latency", model],
        ["calibrate", model],
    ):
        assert main([*words, "--backend", "cuda", *short.get(words[0], ())]) == 2
        assert (
            capsys.readouterr().err
            == "headrace: backend 'cuda' cannot run here: no driver: use the cpu backend\n"
        )


def test_show_with_the_cuda_backend(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {}
    for backend in ("auto", "cpu", "cuda"):
        assert main(["show", model, "--json", "--backend", backend]) == 0
        facts[backend] = json.loads(capsys.readouterr().out)
    assert (
        facts["auto"]["bytes_in_memory"] == facts["cpu"]["bytes_in_memory"]
        and facts["auto"]["backend"] == "cpu"
        and not facts["auto"]["backend_remark"]
    )
    assert list(facts["cuda"]["kv_bytes_per_token"]) == ["bf16", "f16", "f32", "fp8", "int8"]
    assert (
        facts["cuda"]["bytes_in_memory"] > facts["cpu"]["bytes_in_memory"]
        and INTERPRETED in facts["cuda"]["backend_remark"]
    )
    assert main(["show", model, "--backend", "cuda"]) == 0
    assert re.search(rf"runs on +cuda; .*{INTERPRETED}", capsys.readouterr().out)


def test_show_names_the_reason_for_an_unused_gpu(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "headrace.planner.gpu.find_gpu_host", lambda: GpuHost(H100, absent=("triton",))
    )
    assert main(["show", model]) == 0
    printed = capsys.readouterr()
    assert re.search(
        r"runs on +cpu; the GPU is not used: triton is not installed: pip install "
        r"'headrace\[cuda\]'",
        printed.out,
    )
    assert not printed.err


def test_profile_with_interpreted_kernels(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The time of an op includes all its kernels."""
    words = [
        "profile",
        model,
        "--backend",
        "cuda",
        "--prefill",
        "none",
        "--depth",
        "3",
        "--batch",
        "2",
        "--turns",
        "1",
        "--json",
    ]
    assert main(words) == 0
    (phase,) = json.loads(capsys.readouterr().out)["phases"]
    ops = {op["op"]: op for op in phase["ops"]}
    assert {
        "embed",
        "norm",
        "qkv_rope_write",
        "attention",
        "linear_add",
        "glu_linear",
        "linear",
    } <= ops.keys()
    assert all(op["seconds"] > 0 and op["calls"] for op in ops.values())
    # The median of each op may come from another round than the median of the walls.
    assert phase["wall"]["max"] >= sum(op["seconds"] for op in ops.values()) > 0


class TestDoctor:
    def facts(self, capsys: pytest.CaptureFixture[str]) -> Any:
        assert main(["doctor", "--threads", "1", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    def test_doctor_without_a_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        facts = self.facts(capsys)
        assert (facts["gpu"], facts["backend"], facts["backend_remark"]) == (
            None,
            "cpu",
            "no driver: use the cpu backend",
        )

    def test_doctor_with_an_unusable_gpu(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "headrace.planner.gpu.find_gpu_host", lambda: GpuHost(H100, torch_cuda=None)
        )
        facts = self.facts(capsys)
        assert (
            facts["backend"] == "cpu"
            and "the GPU is not used: torch is a CPU build" in facts["backend_remark"]
        )
        assert facts["gpu"]["name"] == H100.name and facts["gpu"]["rates"] is None
        assert main(["doctor", "--threads", "1"]) == 0
        printed = capsys.readouterr().out
        assert (
            re.search(r"auto uses +cpu; the GPU is not used", printed)
            and "132 multiprocessors" in printed
            and "85.0 GB" in printed
        )

    def test_doctor_with_a_gpu(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its figures are made up, and its kernels are interpreted."""
        figures = {
            "memory_free": 8e10,
            "bandwidth": 3e12,
            "copy_bandwidth": 2.8e12,
            "launch_seconds": 9e-6,
            "graph_launch_seconds": 2e-6,
        }
        rates = {"bf16": 8e14, "fp8": 0.0, "int8": 1.5e15, "f32": 6e13}
        monkeypatch.setattr(
            "headrace.planner.gpu.find_gpu_host", lambda: GpuHost(H100, torch_cuda="12.8")
        )
        monkeypatch.setattr(
            "headrace.measure.machine._measure_gpu", lambda: figures | {"rates": rates}
        )
        monkeypatch.setattr(
            "headrace.measure.selftest.selftest",
            lambda backend, threads: [Check(f"{backend}: all", True, "right")],
        )
        assert main(["doctor", "--threads", "1"]) == 0
        printed = capsys.readouterr().out
        assert re.search(r"auto uses +cuda\n", printed) and re.search(
            r"bf16 products +800\.0 T operations/s", printed
        )
        assert (
            "fp8" not in printed
            and "9.0 us, in a graph 2.0 us" in printed
            and "267 bf16 operations per byte" in printed
        )
        assert re.search(r"OK +cpu: all.*\nOK +cuda: all", printed)


def test_no_gpu_module_is_imported_without_a_gpu(model: str) -> None:
    """By whatever face."""
    code = f"""
import sys
import tomllib
from headrace import LLM, SamplingParams
from headrace.cli.main import main
with LLM({model!r}, max_model_len=64) as llm:
    llm.generate("hello", SamplingParams(max_tokens=2))
    assert llm.config.backend == "cpu"
for words in (["show", {model!r}], ["run", {model!r}, "Hi", "--max-tokens", "1"], ["doctor"]):
    assert main(words) == 0
loaded = [name for name in sys.modules if name.partition(".")[0] in ("torch", "triton") or name.startswith("headrace.backend.cuda")]
assert not loaded, loaded
"""  # noqa: E501
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_setup_installs_the_pinned_torch_first() -> None:
    """As `oracle` pins it, which the extra `cuda` admits: so no later requirement brings another
    build of it.
    """
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (pin,) = (one for one in extras["oracle"] if one.startswith("torch=="))
    first, rest = (root / "Makefile").read_text().partition("'.[oracle,test]'")[::2]
    assert rest and re.search(rf"^\t@\$\(PIP\) {re.escape(pin)}", first, re.MULTILINE)
    admitted = [Requirement(one) for one in extras["cuda"] if one.startswith("torch")]
    assert admitted and all(one.specifier.contains(pin.removeprefix("torch==")) for one in admitted)
