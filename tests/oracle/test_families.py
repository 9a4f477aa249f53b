"""Tiny random models of every family: the reference backend's logits against those of transformers in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from headrace.backend import compile_program, forward
from headrace.checkpoint.load import open_checkpoint
from headrace.config import KvConfig
from headrace.model import trace_model
from tests.backend.batches import Sequence, batch_of

SIZE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 256,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

LLAMA, MISTRAL, QWEN2 = (LlamaConfig, LlamaForCausalLM), (MistralConfig, MistralForCausalLM), (Qwen2Config, Qwen2ForCausalLM)
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

FAMILIES: dict[str, tuple[Any, int, dict[str, Any]]] = {  # config and model, KV heads, other options
    "llama2-mha": (LLAMA, 4, {}),
    "llama3-gqa": (LLAMA, 2, {"rope_scaling": LLAMA3 | {"rope_theta": 500000.0}}),
    "llama-mqa": (LLAMA, 1, {"head_dim": 32}),
    "llama-biases": (LLAMA, 2, {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": (LLAMA, 4, {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-yarn": (LLAMA, 4, {"rope_scaling": YARN | {"rope_theta": 1e4}}),
    "smollm2": (LLAMA, 2, {"tie_word_embeddings": True}),
    "mistral-window": (MISTRAL, 2, {"sliding_window": 9}),
    "mistral-full": (MISTRAL, 2, {"sliding_window": None, "head_dim": 24}),
    "qwen2": (QWEN2, 2, {}),
    "qwen2-window": (QWEN2, 2, WINDOW),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_equals_transformers(family: str, tmp_path: Path) -> None:
    (make_config, make_model), kv_heads, options = FAMILIES[family]
    torch.manual_seed(0)
    model = make_model(make_config(**SIZE | options, num_key_value_heads=kv_heads, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the initialiser leaves biases and norms at 0 and 1
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, SIZE["vocab_size"], 120).tolist()
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].numpy()

    checkpoint = open_checkpoint(tmp_path)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    num_groups = len(program.kv_groups)
    assert num_groups == (2 if "max_window_layers" in options else 1)
    executable = compile_program("reference", program, checkpoint.tensors, KvConfig((4,) * num_groups, 32, "f32"), 1)
    got = forward(executable, batch_of([Sequence([2, 0, 3, 1], 32)], [tokens], [([], [])], False, num_groups)).logits
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
