"""DeepSeek-V2 (2024) and V3 (2024): latent attention, shared experts. GGUF: deepseek2."""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.decoder import decoder, sequential
from headrace.model.family import (
    ConfigLayout,
    DraftLayers,
    Family,
    GgufLayout,
    Tensors,
    TensorSource,
)
from headrace.model.fields import Fields
from headrace.model.rope import yarn_temperature
from headrace.model.sources import mla_heads, mla_rows, weights
from headrace.model.spec import ExpertSpec, MlaSpec, ModelSpec, layer_range


def _config(
    config: Fields, architecture: str, dense: int, shared: int, context: int
) -> tuple[ModelSpec, ExpertSpec]:
    """The specification without experts, and the experts.

    Defaults: `dense` leading layers without experts, `shared` experts, and `context`.
    """
    config.require_neutral({"moe_layer_freq": (1,)})
    pe, nope = config.integer("qk_rope_head_dim", 64), config.integer("qk_nope_head_dim", 128)
    rope = from_config.rope_spec(config, pe, config.integer("max_position_embeddings", context))
    spec = from_config.decoder_spec(
        config,
        architecture,
        max_context=context,
        rope=rope,
        computed=("attention_bias", "mlp_bias"),
    )
    if spec.num_kv_heads != spec.num_heads:
        raise config.unsupported("num_key_value_heads", ": it must equal num_attention_heads")
    scaling = config.section("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    temperature = yarn_temperature(rope.factor, scaling.optional_number("mscale_all_dim") or 0.0)
    bias, width = config.flag("attention_bias", False), config.integer("moe_intermediate_size", 0)
    num_dense = config.integer("first_k_dense_replace", dense)
    experts = ExpertSpec(
        num_experts=config.integer("n_routed_experts"),
        top_k=config.integer("num_experts_per_tok"),
        ffn_dim=width,
        factor=config.number("routed_scaling_factor", 1.0),
        shared_ffn_dim=width * config.integer("n_shared_experts", shared),
        dense_layers=tuple(layer_range(min(num_dense, spec.num_layers))),
    )
    mla = MlaSpec(
        kv_rank=config.integer("kv_lora_rank", 512),
        value_dim=config.integer("v_head_dim", 128),
        query_rank=config.integer("q_lora_rank", 0),
    )
    spec = replace(spec, head_dim=nope + pe, mla=mla, qkv_bias=bias, output_bias=bias)
    return replace(spec, attention_scale=temperature**2 * max(spec.head_dim, 1) ** -0.5), experts


def _v2_config(config: Fields) -> ModelSpec:
    config.require_neutral({"scoring_func": ("softmax",), "norm_topk_prob": (False,)})
    spec, experts = _config(config, "deepseek_v2", 0, 2, 2048)
    method = config.string("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.unsupported("topk_method")
    experts = replace(experts, normalised=False)
    if method == "group_limited_greedy":
        groups, top_groups = config.integer("n_group"), config.integer("topk_group")
        experts = replace(experts, groups=groups, top_groups=top_groups)
    return _with_experts(replace(spec, mlp_bias=config.flag("mlp_bias", False)), experts)


def _v3_config(config: Fields) -> ModelSpec:
    config.require_neutral(
        {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "mlp_bias": (False,)}
    )
    spec, experts = _config(config, "deepseek_v3", 3, 1, 4096)
    experts = replace(
        experts,
        scoring="sigmoid",
        normalised=config.flag("norm_topk_prob", True),
        factor=config.number("routed_scaling_factor", 2.5),
        groups=config.integer("n_group", 8),
        top_groups=config.integer("topk_group", 4),
        choice_bias=True,
    )
    assert spec.mla
    mla = replace(spec.mla, is_half_split=not config.flag("rope_interleave", True))
    return _with_experts(replace(spec, mla=mla), experts)


def _with_experts(spec: ModelSpec, experts: ExpertSpec) -> ModelSpec:
    all_dense = len(experts.dense_layers) >= spec.num_layers
    return replace(spec, experts=None if all_dense else experts)


def _gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    def integer(key: str, default: int | None = None) -> int:
        return fields.integer(f"deepseek2.{key}", default)

    head_dim = integer("attention.key_length_mla", integer("attention.key_length"))
    computed = ("expert_count", "expert_group_count", "rope.scaling.yarn_log_multiplier")
    spec = from_gguf.decoder_spec(
        fields, tensors, "deepseek2", head_dim=head_dim, computed=computed
    )
    scoring = fields.integer("deepseek2.expert_gating_func", 1)
    if scoring not in (1, 2):
        raise fields.unsupported("deepseek2.expert_gating_func")
    experts = from_gguf.expert_spec(fields, tensors, "deepseek2", spec)
    experts = replace(
        experts,
        scoring="softmax" if scoring == 1 else "sigmoid",
        normalised=fields.flag("deepseek2.expert_weights_norm", False),
        factor=fields.number("deepseek2.expert_weights_scale", 1.0) or 1.0,
        groups=integer("expert_group_count", 1),
        top_groups=integer("expert_group_used_count", 1),
        choice_bias=any(name.endswith("exp_probs_b.bias") for name in tensors),
        shared_ffn_dim=experts.ffn_dim * integer("expert_shared_count", 0),
    )
    value_dim = integer("attention.value_length_mla", integer("attention.value_length"))
    mla = MlaSpec(
        kv_rank=integer("attention.kv_lora_rank"),
        value_dim=value_dim,
        query_rank=integer("attention.q_lora_rank", 0),
        norm_eps=spec.norm_eps,
    )
    # Converters write a tenth of the weight. A model with a weight keeps the size of cosines and
    # sines, and scales the scores instead.
    weight = 10 * fields.number("deepseek2.rope.scaling.yarn_log_multiplier", 0.0)
    rope, temperature = spec.rope, 1.0
    if rope and weight:
        temperature = yarn_temperature(rope.factor, weight)
        rope = replace(
            rope, attention_factor=fields.positive("deepseek2.rope.scaling.attn_factor", 1.0)
        )
    scale = temperature**2 * max(head_dim, 1) ** -0.5
    spec = replace(
        spec,
        architecture="deepseek_v2",
        num_kv_heads=spec.num_heads,
        rope=rope,
        attention_scale=scale,
        mla=mla,
    )
    return _with_experts(spec, experts)


_ATTENTION = "model.layers.{}.self_attn"
_CONFIG_TENSORS = {
    **from_config.TENSORS,
    **weights(
        {},
        "model.layers.{}",
        {
            "q_a": "self_attn.q_a_proj",
            "q_a_norm": "self_attn.q_a_layernorm",
            "kv_a_norm": "self_attn.kv_a_layernorm",
            "router": "mlp.gate",
            "shared_gate": "mlp.shared_experts.gate_proj",
            "shared_up": "mlp.shared_experts.up_proj",
            "shared_down": "mlp.shared_experts.down_proj",
            "experts.{}.gate": "mlp.experts.{}.gate_proj",
            "experts.{}.up": "mlp.experts.{}.up_proj",
            "experts.{}.down": "mlp.experts.{}.down_proj",
        },
    ),
    "layers.{}.choice_bias": TensorSource("model.layers.{}.mlp.gate.e_score_correction_bias"),
    **mla_rows(
        f"{_ATTENTION}.q_proj", f"{_ATTENTION}.q_b_proj", f"{_ATTENTION}.kv_a_proj_with_mqa"
    ),
    **mla_heads(f"{_ATTENTION}.kv_b_proj.weight"),
}
_GGUF_TENSORS = {
    **from_gguf.TENSORS,
    **from_gguf.EXPERTS,
    **weights(
        {},
        "blk.{}",
        {
            "q_a": "attn_q_a",
            "q_a_norm": "attn_q_a_norm",
            "kv_a_norm": "attn_kv_a_norm",
            "choice": "exp_probs_b",
        },
    ),
    **mla_rows("blk.{}.attn_q", "blk.{}.attn_q_b", "blk.{}.attn_kv_a_mqa"),
    **mla_heads("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"),
}

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    decoder(sequential),
    config=ConfigLayout(
        architectures=("DeepseekV2ForCausalLM", "deepseek_v2"),
        spec=_v2_config,
        tensors=_CONFIG_TENSORS,
    ),
    gguf=GgufLayout(
        architectures=("deepseek2",),
        spec=_gguf,
        tensors=_GGUF_TENSORS,
        alternatives=(mla_heads("blk.{}.attn_kv_b.weight"),),
        draft_layers=DraftLayers(
            prefix="blk.",
            tensors={
                "embed": "nextn.embed_tokens.weight",
                "token_norm": "nextn.enorm.weight",
                "row_norm": "nextn.hnorm.weight",
                "join": "nextn.eh_proj.weight",
                "norm": "nextn.shared_head_norm.weight",
                "head": "nextn.shared_head_head.weight",
            },
        ),
    ),
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    decoder(sequential),
    config=ConfigLayout(
        architectures=("DeepseekV3ForCausalLM", "deepseek_v3"),
        spec=_v3_config,
        tensors=_CONFIG_TENSORS,
        draft_layers=DraftLayers(
            prefix="model.layers.",
            tensors={
                "embed": "embed_tokens.weight",
                "token_norm": "enorm.weight",
                "row_norm": "hnorm.weight",
                "join": "eh_proj.weight",
                "norm": "shared_head.norm.weight",
                "head": "shared_head.head.weight",
            },
        ),
    ),
)
