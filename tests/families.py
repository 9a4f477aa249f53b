"""Tiny models of every family and variant, made by transformers."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from headrace.model import FAMILIES
from headrace.model.fields import JsonFields
from headrace.model.spec import ModelSpec

VOCAB = 101
CONTEXT = 256
SIZE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
}
GPT2_SIZE = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, "vocab_size": VOCAB}
FALCON_SIZE = {name: value for name, value in SIZE.items() if name != "num_key_value_heads"}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 10 for i in range(8)],
    "long_factor": [2 + i / 2 for i in range(8)],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
LATENT = SIZE | {
    **{
        "num_key_value_heads": 4,
        "kv_lora_rank": 40,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
    },
    **{
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
V2_GROUPS = GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}
V3_GROUPS = GROUPS | {"routed_scaling_factor": 2.5}
OSS = {
    "head_dim": 32,
    "sliding_window": 9,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
}
LATENT_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}


class Variant(NamedTuple):
    """A model family: its name here, its class in transformers, and the options of a tiny model."""

    family: str
    model: str
    options: dict[str, Any]
    kv_groups: int = 1


VARIANTS: dict[str, Variant] = {
    "llama2-mha": Variant("llama", "LlamaForCausalLM", SIZE | {"num_key_value_heads": 4}),
    "llama3-gqa": Variant(
        "llama", "LlamaForCausalLM", SIZE | {"rope_scaling": LLAMA3 | {"rope_theta": 500000.0}}
    ),
    "llama-mqa": Variant(
        "llama", "LlamaForCausalLM", SIZE | {"num_key_value_heads": 1, "head_dim": 32}
    ),
    "llama-biases": Variant(
        "llama", "LlamaForCausalLM", SIZE | {"attention_bias": True, "mlp_bias": True}
    ),
    "llama-linear": Variant("llama", "LlamaForCausalLM", SIZE | {"rope_scaling": LINEAR}),
    "llama-dynamic": Variant(
        "llama", "LlamaForCausalLM", SIZE | {"rope_scaling": LINEAR | {"rope_type": "dynamic"}}
    ),
    "llama-yarn": Variant(
        "llama", "LlamaForCausalLM", SIZE | {"rope_scaling": YARN | {"rope_theta": 1e4}}
    ),
    "llama-relu": Variant("llama", "LlamaForCausalLM", SIZE | {"hidden_act": "relu"}),
    "smollm2": Variant("llama", "LlamaForCausalLM", SIZE | {"tie_word_embeddings": True}),
    "mistral-window": Variant("mistral", "MistralForCausalLM", SIZE | {"sliding_window": 9}),
    "mistral-full": Variant(
        "mistral", "MistralForCausalLM", SIZE | {"sliding_window": None, "head_dim": 24}
    ),
    "mixtral": Variant("mixtral", "MixtralForCausalLM", SIZE | {"num_local_experts": 4}),
    "mixtral-window": Variant(
        "mixtral", "MixtralForCausalLM", SIZE | {"num_local_experts": 4, "sliding_window": 9}
    ),
    "qwen2": Variant("qwen2", "Qwen2ForCausalLM", SIZE),
    "qwen2-window": Variant(
        "qwen2",
        "Qwen2ForCausalLM",
        SIZE | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        kv_groups=2,
    ),
    "qwen2-moe": Variant(
        "qwen2_moe", "Qwen2MoeForCausalLM", SIZE | EXPERTS | {"shared_expert_intermediate_size": 48}
    ),
    "qwen3": Variant("qwen3", "Qwen3ForCausalLM", SIZE | {"head_dim": 32}),
    "qwen3-biases": Variant(
        "qwen3", "Qwen3ForCausalLM", SIZE | {"head_dim": 16, "attention_bias": True}
    ),
    "qwen3-moe": Variant(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        SIZE | EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
    ),
    "qwen3-moe-mixed": Variant(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        SIZE | EXPERTS | {"head_dim": 16, "mlp_only_layers": [1]},
    ),
    "olmo2": Variant("olmo2", "Olmo2ForCausalLM", SIZE),
    "olmoe": Variant("olmoe", "OlmoeForCausalLM", SIZE | EXPERTS),
    "gemma2": Variant(
        "gemma2",
        "Gemma2ForCausalLM",
        SIZE | {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9},
        kv_groups=2,
    ),
    "gemma3": Variant(
        "gemma3",
        "Gemma3ForCausalLM",
        SIZE
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 9,
            "num_hidden_layers": 7,
        },
        kv_groups=2,
    ),
    "phi2": Variant(
        "phi2", "PhiForCausalLM", SIZE | {"num_key_value_heads": 4, "intermediate_size": 256}
    ),
    "phi3": Variant("phi3", "Phi3ForCausalLM", SIZE | {"pad_token_id": 0}),
    "phi3-window": Variant(
        "phi3", "Phi3ForCausalLM", SIZE | {"pad_token_id": 0, "sliding_window": 9}
    ),
    "phi3-longrope": Variant(
        "phi3",
        "Phi3ForCausalLM",
        SIZE
        | {
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": LONGROPE | {"rope_theta": 1e4},
        },
    ),
    "phi4-partial": Variant(
        "phi3",
        "Phi3ForCausalLM",
        SIZE
        | {
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "deepseek-v2": Variant(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        LATENT | V2_GROUPS | {"rope_scaling": LATENT_YARN, "rope_theta": 1e4},
    ),
    "deepseek-v2-lite": Variant(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        LATENT | {"q_lora_rank": None, "num_experts_per_tok": 2},
    ),
    "deepseek-v2-biases": Variant(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        LATENT | {"attention_bias": True, "mlp_bias": True, "num_experts_per_tok": 3},
    ),
    "deepseek-v3": Variant(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        LATENT | V3_GROUPS | {"rope_scaling": LATENT_YARN, "rope_theta": 1e4},
    ),
    "deepseek-v3-half-split": Variant(
        "deepseek_v3", "DeepseekV3ForCausalLM", LATENT | V3_GROUPS | {"rope_interleave": False}
    ),
    "gpt-oss": Variant(
        "gpt_oss",
        "GptOssForCausalLM",
        SIZE | OSS | {"rope_parameters": YARN | {"rope_theta": 1e4, "truncate": False}},
        kv_groups=2,
    ),
    "gpt-oss-full": Variant(
        "gpt_oss",
        "GptOssForCausalLM",
        SIZE | OSS | {"layer_types": ["full_attention"] * 3, "attention_bias": False},
    ),
    "smollm3": Variant(
        "smollm3", "SmolLM3ForCausalLM", SIZE | {"num_hidden_layers": 5, "pad_token_id": 0}
    ),
    "granite": Variant(
        "granite",
        "GraniteForCausalLM",
        SIZE
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.3,
            "logits_scaling": 5.0,
        },
    ),
    "command-r": Variant("cohere", "CohereForCausalLM", SIZE),
    "command-r-plus": Variant("cohere", "CohereForCausalLM", SIZE | {"use_qk_norm": True}),
    "command-r7b": Variant(
        "cohere2",
        "Cohere2ForCausalLM",
        SIZE | {"num_hidden_layers": 5, "sliding_window": 9},
        kv_groups=2,
    ),
    "stablelm": Variant("stablelm", "StableLmForCausalLM", SIZE),
    "stablelm-parallel": Variant(
        "stablelm",
        "StableLmForCausalLM",
        SIZE | {"use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "starcoder2": Variant("starcoder2", "Starcoder2ForCausalLM", SIZE),
    "gpt2": Variant("gpt2", "GPT2LMHeadModel", GPT2_SIZE),
    "starcoder": Variant("gpt_bigcode", "GPTBigCodeForCausalLM", GPT2_SIZE),
    "gpt-j": Variant("gptj", "GPTJForCausalLM", GPT2_SIZE | {"rotary_dim": 8}),
    "gpt-neox": Variant("gpt_neox", "GPTNeoXForCausalLM", FALCON_SIZE),
    "gpt-neox-sequential": Variant(
        "gpt_neox", "GPTNeoXForCausalLM", FALCON_SIZE | {"use_parallel_residual": False}
    ),
    "falcon-7b": Variant("falcon", "FalconForCausalLM", FALCON_SIZE),
    "falcon-40b": Variant(
        "falcon",
        "FalconForCausalLM",
        FALCON_SIZE | {"num_kv_heads": 2, "new_decoder_architecture": True},
    ),
    "bloom": Variant(
        "bloom",
        "BloomForCausalLM",
        {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB},
    ),
    "opt": Variant(
        "opt",
        "OPTForCausalLM",
        {
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "vocab_size": VOCAB,
            "max_position_embeddings": CONTEXT,
        },
    ),
    "nemotron": Variant("nemotron", "NemotronForCausalLM", SIZE),
    "mpt": Variant(
        "mpt",
        "MptForCausalLM",
        {"d_model": 48, "n_layers": 3, "n_heads": 3, "vocab_size": VOCAB, "max_seq_len": CONTEXT},
    ),
}


def spec_of(name: str) -> ModelSpec:
    """Return the specification that our family reads from the variant's configuration."""
    layout = FAMILIES[VARIANTS[name].family].config
    assert layout
    return layout.spec(JsonFields(config_of(name).to_dict(), "config.json").named(layout.fields))


def config_of(name: str, **changed: Any) -> Any:
    """Return the configuration of a variant, with `options` on top."""
    model: Any = getattr(transformers, VARIANTS[name].model)
    return model.config_class(
        **{"bos_token_id": 0, "eos_token_id": 0} | VARIANTS[name].options | changed
    )


def save_model(name: str, folder: Path, **changed: Any) -> Any:
    """Save a random model of a variant, as transformers does, with `changed` options.

    Parameters that transformers initialises with 0 or 1 are random, too.
    """
    torch.manual_seed(0)
    made: Any = getattr(transformers, VARIANTS[name].model)
    model = made._from_config(config_of(name, **changed), attn_implementation="eager").eval()
    with torch.no_grad():
        choices = (
            buffer
            for name, buffer in model.named_buffers()
            if name.endswith("e_score_correction_bias")
        )
        for parameter in (*model.parameters(), *choices):
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def logits_of(model: Any, tokens: list[int]) -> NDArray[np.float32]:  # [tokens, vocab]
    """Return transformers' logits of the tokens."""
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


def hidden_of(model: Any, tokens: list[int]) -> NDArray[np.float32]:  # [tokens, dim]
    """Return transformers' hidden states after the final norm."""
    with torch.no_grad():
        hidden: NDArray[np.float32] = (
            model.base_model(torch.tensor([tokens])).last_hidden_state[0].numpy()
        )
    return hidden
