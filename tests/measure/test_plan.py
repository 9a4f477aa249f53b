import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.backend import lower_program
from headrace.cli.main import main
from headrace.errors import MemoryLimitError, RequestError
from headrace.measure.placed_model import open_model, stage_programs
from headrace.measure.plan import plan, plan_facts
from headrace.model import trace_model
from headrace.parallel.mesh import Mesh, weights_of
from headrace.planner.adapter_costs import LowRankProducts
from headrace.planner.calibration import Calibration
from headrace.planner.memory import ProcessMemory
from headrace.planner.reach import HostTime, known_reaches
from headrace.program.op import StepSize
from tests.planner.models import (
    LLAMA_2_7B_CONFIG,
    LLAMA_8B_CONFIG,
    LLAMA_70B_CONFIG,
    write_config,
)


@pytest.fixture
def llama_8b(tmp_path: Path) -> str:
    return str(write_config(tmp_path, LLAMA_8B_CONFIG))


def test_memory_of_llama_2_7b(tmp_path: Path) -> None:
    """13.5 GB of weights in 16 bits, and 2 GiB of KV for 4,096 tokens: 524,288 bytes each."""
    model = str(write_config(tmp_path, LLAMA_2_7B_CONFIG))
    found = plan(model, on="a100-40", context=4096)
    assert found.fit.kv_per_sequence == 4096 * 524_288 == 2 << 30
    assert found.fit.weights == pytest.approx(13.48e9, rel=0.001)
    assert found.fit.sequences == found.fit.kv_budget // (2 << 30) == 11


def test_ranks_share_weights_and_kv(llama_8b: str) -> None:
    one, two = plan(llama_8b, on="h100-sxm"), plan(llama_8b, on="h100-sxm", tensor=2)
    assert two.fit.weights == pytest.approx(one.fit.weights / 2, rel=0.04)
    assert two.fit.kv_per_sequence == one.fit.kv_per_sequence / 2
    assert one.per_token / 2 < two.per_token < one.per_token
    assert any(part.bound == "link" for part in two.decode.parts)
    assert not any(part.link for part in one.decode.parts)


@pytest.mark.parametrize("mesh", [Mesh(3), Mesh(8), Mesh(5, 2), Mesh(6, 3)])
def test_a_plan_takes_the_largest_share_of_each_stage(llama_8b: str, mesh: Mesh) -> None:
    """Eight KV heads on three devices are two, three and three."""
    checkpoint = open_model(llama_8b, "Q4_0")
    traced = trace_model(checkpoint.spec, checkpoint.tensors)
    stages = stage_programs(checkpoint, "cuda", mesh)
    for stage, planned in enumerate(stages):
        for rank in mesh.group(stage):
            share = mesh.program(traced, rank)
            lowered = lower_program("cuda", share, weights_of(share, checkpoint.tensors))
            assert lowered.weight_bytes <= planned.weight_bytes
            assert lowered.kv_groups[0].block_bytes("bf16", 1) <= planned.kv_groups[0].block_bytes(
                "bf16", 1
            )


def test_plan_of_a_lossy_mode(llama_8b: str) -> None:
    """A window of 1,024 tokens bounds the KV that a deep step reads."""
    work: dict[str, Any] = {"on": "h100-sxm", "prompt": 32_000, "batch": 8}
    full = plan(llama_8b, **work)
    window = plan(llama_8b, **work, attention_window=1024)
    assert window.lossy.endswith("the last 1,024 tokens only") and not full.lossy
    assert window.fit.kv_per_sequence < full.fit.kv_per_sequence / 8
    assert window.per_token < 0.8 * full.per_token
    assert plan_facts(window)["lossy"] == window.lossy
    assert main(["plan", llama_8b, "--attention-window", "8", "--list"]) == 2


def write_adapter(folder: Path, rank: int = 8) -> str:
    """A PEFT adapter of queries and outputs of an 8B model's first two layers."""
    ones = np.ones((rank, 4096), np.float32)
    save_file(
        {
            f"base_model.model.model.layers.{layer}.self_attn.{part}_proj.lora_{half}.weight": (
                ones if half == "A" else np.ascontiguousarray(ones.T)
            )
            for layer in range(2)
            for part in "qo"
            for half in "AB"
        },
        folder / "adapter_model.safetensors",
    )
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 16}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return str(folder)


def test_bytes_and_time_of_an_adapter(llama_8b: str, tmp_path: Path) -> None:
    """Four pairs of matrices [8, 4096] and [4096, 8]: both backends take tiles of 16 ranks."""
    adapter = write_adapter(tmp_path)
    for machine, down_ranks, up_ranks in (("h100-sxm", 16, 16), ("zen4-server", 16, 8)):
        base = plan(llama_8b, on=machine, batch=4)
        found = plan(llama_8b, on=machine, batch=4, adapter=adapter)
        nbytes = 4 * 2 * 4096 * (down_ranks + up_ranks)
        assert (found.fit.adapter, base.fit.adapter) == (nbytes, 0)
        assert base.fit.kv_budget - found.fit.kv_budget == nbytes
        assert found.fit.weights == base.fit.weights and found.per_token > base.per_token
        (part,) = (part for part in found.decode.parts if part.part == "adapter")
        assert part.calls == 4 and plan_facts(found)["adapter"] == nbytes
    # Both matrices of a pair are read, and the first product takes 16 ranks.
    (op, *others) = (op for op in found.stages[0].ops if isinstance(op, LowRankProducts))
    step = StepSize(((576, 1),) * 4, 4, 2.0)
    assert len(others) == 3 and op.bytes(step) == nbytes // 4
    assert op.flops(step) == 2 * 4 * (16 + 8) * 4096


def test_ranks_have_shares_of_an_adapter(llama_8b: str, tmp_path: Path) -> None:
    """Two ranks divide the rows of queries; rows of outputs stay whole."""
    adapter = write_adapter(tmp_path)
    one = plan(llama_8b, on="h100-sxm", adapter=adapter).fit.adapter
    two = plan(llama_8b, on="h100-sxm", adapter=adapter, tensor=2).fit.adapter
    assert one / 2 < two < one


def test_an_adapter_that_a_plan_cannot_count(
    llama_8b: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = write_adapter(tmp_path)
    assert main(["plan", llama_8b, "--adapter", adapter, "--goal", "users=2"]) == 2
    assert "--adapter is for the plan of one configuration" in capsys.readouterr().err
    norms = {"base_model.model.model.norm.weight": np.ones(4096, np.float32)}
    save_file(norms, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 8, "modules_to_save": ["norm"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    assert main(["plan", llama_8b, "--adapter", adapter, "--on", "l4"]) == 3
    assert "a weight of its own" in capsys.readouterr().err


def test_stages_of_a_pipeline_take_turns(llama_8b: str) -> None:
    """A token passes all stages; with as many steps in flight as stages, none waits."""
    lone = plan(llama_8b, on="h100-sxm", pipeline=2)
    assert len(lone.decode.stages) == 2
    assert lone.per_token == pytest.approx(sum(lone.decode.stages))
    full = plan(llama_8b, on="h100-sxm", pipeline=2, batch=64)
    assert full.per_token == pytest.approx(2 * full.decode.slowest)


def test_stages_on_hosts_of_their_own(llama_8b: str) -> None:
    """A prompt's chunk sends 2,048 x 4,096 numbers of 32 bits, 10.7 ms at 3.125 GB/s."""
    nvlink = plan(llama_8b, on="h100-sxm", tensor=2, pipeline=2, prompt=2048)
    ethernet = plan(
        llama_8b, on="h100-sxm", tensor=2, pipeline=2, network="ethernet-25", prompt=2048
    )
    # A fifth of the network's bandwidth is lost, and the link between two devices stays.
    sent = 2048 * 4096 * 4
    lost = sent / (0.8 * 3.125e9) + 50e-6 - sent / (0.8 * 450e9) - 8e-6
    assert ethernet.prefill.total - nvlink.prefill.total == pytest.approx(lost)
    servers = plan(llama_8b, on="zen4-server", pipeline=2, network="ethernet-100")
    assert len(servers.decode.stages) == 2 and "802.3ba" in servers.place.sources[-1]


def test_drafts_gain_the_expected_tokens(llama_8b: str) -> None:
    """(1 - a^5) / (1 - a) tokens in a step with 4 drafts: 2.77 for a = 0.7."""
    drafted = plan(llama_8b, on="l4", draft_depth=4, draft_acceptance=0.7)
    plain = plan(llama_8b, on="l4")
    assert drafted.draft and drafted.draft.tokens == pytest.approx(2.7731)
    assert plain.per_token / drafted.per_token == pytest.approx(drafted.draft.speedup)
    # Five rows read the weights once, so little is lost.
    assert 0.9 * drafted.draft.tokens < drafted.draft.speedup <= drafted.draft.tokens


def test_drafts_lose_if_rows_are_bound_by_arithmetic(llama_8b: str) -> None:
    found = plan(llama_8b, on="h100-sxm", batch=512, draft_depth=8, draft_acceptance=0.3)
    assert found.draft and found.draft.speedup < 1


def test_cost(llama_8b: str) -> None:
    found = plan(llama_8b, on="h100-sxm", tensor=2, batch=8)
    costs = found.cost(price=3.6)
    assert costs
    # Two devices at 3.6 $/h are 0.002 $/s.
    assert costs[1] == pytest.approx(2000 / found.tokens_per_second)
    assert costs[0] == pytest.approx(2000 * found.first_token / 512)
    assert plan(llama_8b, on="mi300x").cost() is None


def test_a_long_prompt_runs_in_chunks(llama_8b: str) -> None:
    short = plan(llama_8b, on="h100-sxm", prompt=2048)
    long = plan(llama_8b, on="h100-sxm", prompt=8192)
    assert 4 * short.first_token < long.first_token < 6 * short.first_token


def test_this_machine(llama_8b: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.planner import hardware
    from headrace.planner.machine_files import read_machine

    known = read_machine("zen4-server").machine()
    monkeypatch.setattr(hardware, "this_machine", lambda: known)
    monkeypatch.setattr("headrace.measure.place.stored_calibration", lambda: None)
    monkeypatch.setattr("headrace.planner.host.available_memory", lambda: 64 << 30)
    here, there = plan(llama_8b), plan(llama_8b, on="zen4-server")
    assert here.per_token == there.per_token and here.fit.memory == 64 << 30
    with pytest.raises(RequestError, match="'this' is one device"):
        plan(llama_8b, tensor=2)


def test_a_calibration_of_this_machine(llama_8b: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factors replace the shipped ones, its host time counts, and the answer names it."""
    from headrace.planner import hardware
    from headrace.planner.machine_files import read_machine

    known = read_machine("zen4-server").machine()
    shipped = known_reaches("cpu")
    assert shipped
    measured = replace(shipped, source="a test", host=HostTime(engine=1.0, request=5.0))
    calibration = Calibration(measured, ProcessMemory(base=10**6, per_token=0.0))
    monkeypatch.setattr(hardware, "this_machine", lambda: known)
    monkeypatch.setattr("headrace.planner.host.available_memory", lambda: 64 << 30)
    monkeypatch.setattr("headrace.measure.place.stored_calibration", lambda: calibration)
    monkeypatch.setattr("headrace.measure.run_memory.stored_calibration", lambda: calibration)
    found = plan(llama_8b)
    assert plan_facts(found)["reach"] == "a test"
    assert found.decode.parts[0].part == "host" and found.per_token > 1
    assert found.first_token > 6
    assert found.run_memory and found.run_memory.base == 10**6
    shipped_plan = plan(llama_8b, on="zen4-server")
    assert "Zen 5" in plan_facts(shipped_plan)["reach"]
    assert plan(llama_8b, on="l4").run_memory is None


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"on": "h1000"}, RequestError, "machine 'h1000' is unknown; did you mean"),
        ({"format": "Q4_9"}, RequestError, "format 'Q4_9' is unknown; choose from"),
        ({"context": 1 << 20}, RequestError, "exceeds the model's 131,072 tokens"),
        ({"on": "raspberry-pi-5"}, MemoryLimitError, "do not fit in the 8,000,000,000 bytes"),
        ({"on": "zen4-server", "kv_dtype": "fp8"}, RequestError, "'fp8' is not supported on cpu"),
        ({"on": "zen4-server", "tensor": 2}, RequestError, "has no link to another"),
        ({"network": "token-ring"}, RequestError, "'token-ring' is unknown; known are: ethernet"),
        ({"network": "ethernet-25"}, RequestError, "connects pipeline stages, and there is one"),
    ],
)
def test_one_clear_error(
    llama_8b: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(llama_8b, **{"on": "h100-sxm", **options})  # type: ignore[arg-type]


def test_a_large_model_asks_for_more_devices(tmp_path: Path) -> None:
    model = str(write_config(tmp_path, LLAMA_70B_CONFIG))
    with pytest.raises(MemoryLimitError, match="use more devices"):
        plan(model, on="h100-sxm")
    assert plan(model, on="h100-sxm", tensor=4).fit.sequences > 0


def test_facts_are_json(llama_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama_8b, "--on", "l4", "--format", "Q4_0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == json.loads(json.dumps(plan_facts(plan(llama_8b, on="l4", format="Q4_0"))))
    assert sum(part["seconds"] for part in facts["decode"]["parts"]) == pytest.approx(
        facts["per_token"]
    )


def test_the_table_and_its_arithmetic(llama_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", llama_8b, "--on", "h100-sxm", "-tp", "2", "--draft", "4:0.7", "--why"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for text in ("2 x NVIDIA H100 SXM", "exchanges", "2.77 tokens in a step", "source: NVIDIA"):
        assert text in printed
    assert main(["plan", "--list"]) == 0
    assert "rtx-4090" in capsys.readouterr().out


@pytest.mark.parametrize(
    "config, message",
    [
        ('{"architectures": ["BertModel"], "model_type": "bert"}', "'BertModel' is an encoder"),
        ('{"architectures": ["Mamba2ForCausalLM"]}', "'Mamba2ForCausalLM'"),
        ('{"architectures": [', "not valid JSON"),
        ('{"architectures": ["LlamaForCausalLM"]}', "is missing"),
    ],
)
def test_a_config_of_no_family_is_one_clear_error(
    tmp_path: Path, config: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert main(["plan", str(tmp_path), "--on", "l4"]) == 3
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1


def test_a_missing_price_is_named(llama_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama_8b, "--on", "mi300x"]) == 0
    assert "no price is known; add --price" in capsys.readouterr().out
    assert main(["plan", llama_8b, "--on", "mi300x", "--goal", "cost<1"]) == 2
    assert "mi300x has no known price; add --price" in capsys.readouterr().err


def test_no_torch_is_imported(llama_8b: str) -> None:
    code = (
        "import sys; from headrace.measure.plan import plan; "
        f"plan({llama_8b!r}, on='h100-sxm', format='Q4_0'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
