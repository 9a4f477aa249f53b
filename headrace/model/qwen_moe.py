"""Qwen1.5-MoE and Qwen2-MoE (2024), with a shared expert, and Qwen3-MoE (2025)."""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama, qwen2, qwen3
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import half_split, weights
from headrace.model.spec import ExpertSpec, ModelSpec, layer_range

_COMPUTED = ("num_experts", "num_local_experts")


def _with_experts(config: Fields, spec: ModelSpec, shared: int) -> ModelSpec:
    count = config.integer("num_experts", config.integer("num_local_experts", 0))
    experts = ExpertSpec(
        num_experts=count,
        top_k=config.integer("num_experts_per_tok"),
        ffn_dim=config.integer("moe_intermediate_size"),
        normalised=config.flag("norm_topk_prob", False),
        shared_ffn_dim=shared,
        shared_gate=shared > 0,
        dense_layers=_dense_layers(config, spec.num_layers),
    )
    return replace(spec, experts=experts if len(experts.dense_layers) < spec.num_layers else None)


def _dense_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    """Listed layers, and all except every `step`-th layer."""
    step, listed = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if step < 1:
        raise config.unsupported("decoder_sparse_step")
    if not isinstance(listed, list):
        raise config.unsupported("mlp_only_layers")
    return tuple(
        layer for layer in layer_range(num_layers) if layer in listed or (layer + 1) % step
    )


def _qwen2_config(config: Fields) -> ModelSpec:
    spec = qwen2.config_spec(config, "qwen2_moe", *_COMPUTED)
    spec = replace(spec, qkv_bias=config.flag("qkv_bias", True))
    return _with_experts(config, spec, config.integer("shared_expert_intermediate_size", 5632))


def _qwen3_config(config: Fields) -> ModelSpec:
    return _with_experts(config, qwen3.config_spec(config, "qwen3_moe", *_COMPUTED), 0)


def _qwen2_gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "qwen2moe", computed=("expert_count",))
    shared = fields.integer("qwen2moe.expert_shared_feed_forward_length")
    experts = from_gguf.expert_spec(fields, tensors, "qwen2moe", spec)
    return replace(
        spec,
        architecture="qwen2_moe",
        experts=replace(experts, normalised=False, shared_ffn_dim=shared, shared_gate=True),
    )


def _qwen3_gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "qwen3moe", computed=("expert_count",))
    return replace(
        spec,
        architecture="qwen3_moe",
        qk_norm="head",
        experts=from_gguf.expert_spec(fields, tensors, "qwen3moe", spec),
    )


TENSORS = from_config.TENSORS | weights(
    {},
    "model.layers.{}.mlp",
    {
        "router": "gate",
        "experts.{}.gate": "experts.{}.gate_proj",
        "experts.{}.up": "experts.{}.up_proj",
        "experts.{}.down": "experts.{}.down_proj",
        "shared_router": "shared_expert_gate",
        "shared_gate": "shared_expert.gate_proj",
        "shared_up": "shared_expert.up_proj",
        "shared_down": "shared_expert.down_proj",
    },
)

QWEN2_MOE = Family(
    "qwen2_moe",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("Qwen2MoeForCausalLM", "qwen2_moe"),
        spec=_qwen2_config,
        tensors=half_split(TENSORS),
    ),
    gguf=GgufLayout(
        architectures=("qwen2moe",),
        spec=_qwen2_gguf,
        tensors=half_split(from_gguf.TENSORS | from_gguf.EXPERTS),
    ),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("Qwen3MoeForCausalLM", "qwen3_moe"),
        spec=_qwen3_config,
        tensors=half_split(TENSORS),
    ),
    gguf=GgufLayout(
        architectures=("qwen3moe",),
        spec=_qwen3_gguf,
        tensors=half_split(from_gguf.TENSORS | from_gguf.EXPERTS),
    ),
)
