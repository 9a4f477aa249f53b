"""OLMoE (Muennighoff et al. 2024): Llama with experts, and norms over rows of queries and keys."""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama, qwen_moe
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import half_split
from headrace.model.spec import ExpertSpec, ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    spec = from_config.decoder_spec(
        config,
        "olmoe",
        max_context=4096,
        default_eps=1e-5,
        computed=("num_experts", "num_local_experts"),
    )
    experts = ExpertSpec(
        num_experts=config.integer("num_experts", config.integer("num_local_experts", 64)),
        top_k=config.integer("num_experts_per_tok", 8),
        ffn_dim=spec.ffn_dim,
        normalised=config.flag("norm_topk_prob", False),
    )
    return replace(spec, qk_norm="row", experts=experts)


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "olmoe", computed=("expert_count",))
    return replace(
        spec,
        qk_norm="row",
        experts=replace(from_gguf.expert_spec(fields, tensors, "olmoe", spec), normalised=False),
    )


OLMOE = Family(
    "olmoe",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("OlmoeForCausalLM", "olmoe"),
        spec=_config_spec,
        tensors=half_split(qwen_moe.TENSORS),
    ),
    gguf=GgufLayout(
        architectures=("olmoe",),
        spec=_gguf_spec,
        tensors=half_split(from_gguf.TENSORS | from_gguf.EXPERTS),
    ),
)
