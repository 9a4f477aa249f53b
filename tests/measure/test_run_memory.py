"""Memory of a run on the `cpu` backend, counted before it and then measured."""

from typing import Any

import numpy as np
import pytest

from headrace.backend import instructions
from headrace.backend.cpu.executable import CpuExecutable
from headrace.backend.cpu.memory import activation_bytes, low_rank_bytes
from headrace.config import KvConfig
from headrace.measure.placed_model import stage_programs
from headrace.measure.random_model import random_checkpoint
from headrace.measure.run_memory import run_memory
from headrace.model import trace_model
from headrace.parallel.mesh import Mesh
from headrace.planner.memory import ProcessMemory, used_kv, whole_pages
from headrace.planner.steps import start_steps
from headrace.program.adapter import LowRank
from headrace.program.op import StepSize

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "experts": BASE
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "windows": BASE
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 40,
        "query_pre_attn_scalar": 32,
    },
    "mla": BASE
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 40,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
PROCESS = ProcessMemory(base=1000, per_token=2.0)


@pytest.mark.parametrize("format", ["Q4_0", "Q8_0", "BF16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_kv_to_the_byte(name: str, format: str) -> None:
    checkpoint = random_checkpoint(name, CONFIGS[name], format)
    program = stage_programs(checkpoint, "cpu", Mesh())[0]
    blocks = tuple(range(3, 3 + len(program.kv_groups)))
    traced = trace_model(checkpoint.spec, checkpoint.tensors)
    executable = CpuExecutable(traced, checkpoint.tensors, KvConfig(blocks), 1, instructions("cpu"))
    executable.wait_for_weights()
    assert executable.plan.weight_bytes == program.weight_bytes
    assert executable.plan.kv_bytes == [
        count * group.block_bytes("bf16", 32)
        for count, group in zip(blocks, program.kv_groups, strict=True)
    ]
    executable.close()


def test_activations_of_a_plan_by_hand() -> None:
    """Rows of a dense model in Q4_0: each buffer by its form and width."""
    checkpoint = random_checkpoint("dense", CONFIGS["dense"], "Q4_0")
    program = stage_programs(checkpoint, "cpu", Mesh())[0]
    count = activation_bytes(program, checkpoint.tensors, "bf16", "avx512bf16")
    one, two = (count(StepSize(((0, rows),), 1, 2.0)) for rows in (512, 1024))
    assert one < two < 2 * one
    # The logits of a further sequence take a line of 96 numbers, and its hidden row.
    more = count(StepSize(((0, 512),), 9, 2.0)) - one
    assert more >= 8 * 4 * (96 + 64)
    with_adapters = activation_bytes(program, checkpoint.tensors, "bf16", "avx512bf16", True)
    assert with_adapters(StepSize(((0, 512),), 1, 2.0)) > one


def test_memory_of_a_run() -> None:
    checkpoint = random_checkpoint("dense", CONFIGS["dense"], "BF16")
    program = stage_programs(checkpoint, "cpu", Mesh())[0]
    found = run_memory(
        checkpoint,
        program,
        PROCESS,
        kv_dtype="bf16",
        prompt=100,
        output=20,
        batch=3,
        memory=8 << 30,
    )
    assert found.tokenizer == 2 * 96 and found.base == 1000
    # The tensors of a random model are arrays, not pages of a file.
    assert found.converted == sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert found.loaded == 1000 + 192 + found.converted + found.weights
    assert found.peak == found.loaded + found.kv + found.kv_ahead + found.activations
    # Three runs of eight blocks of 32 tokens, in whole pages.
    block = sum(group.block_bytes("bf16", 32) for group in program.kv_groups)
    assert found.kv == whole_pages(24 * block)
    assert used_kv(program.kv_groups, "bf16", 257, 1, 32) == {"3 layers": whole_pages(16 * block)}


def test_low_rank_matrices_have_whole_tiles() -> None:
    down, up = np.zeros((20, 33), np.float32), np.zeros((40, 20), np.float32)
    assert low_rank_bytes(LowRank(down, up, 1.0)) == 2 * (32 * 34 + 48 * 20)


def test_steps_of_a_batch_of_prompts() -> None:
    steps = list(start_steps(100, 3, 128, 2.0))
    assert [step.seqs for step in steps] == [
        ((0, 100), (0, 28)),
        ((100, 1), (28, 72), (0, 55)),
        ((101, 1), (100, 1), (55, 45)),
    ]
    assert [step.logit_rows for step in steps] == [1, 2, 3]
    assert list(start_steps(5, 1, 128, 2.0)) == [StepSize(((0, 5),), 1, 2.0)]
