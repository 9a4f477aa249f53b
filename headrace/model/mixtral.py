"""Mixtral (Jiang et al. 2024): Mistral with experts. GGUF files call it llama."""

from dataclasses import replace

from headrace.model import from_config, llama
from headrace.model.family import ConfigLayout, Family
from headrace.model.fields import Fields
from headrace.model.sources import half_split, weights
from headrace.model.spec import ExpertSpec, ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    windows = from_config.sliding_windows(config, config.integer("sliding_window", 0))
    spec = from_config.decoder_spec(
        config,
        "mixtral",
        max_context=131_072,
        kv_heads=8,
        default_eps=1e-5,
        theta=1e6,
        windows=windows,
        computed=("num_local_experts",),
    )
    experts = ExpertSpec(
        num_experts=config.integer("num_local_experts", 8),
        top_k=config.integer("num_experts_per_tok", 2),
        ffn_dim=spec.ffn_dim,
    )
    return replace(spec, experts=experts)


_EXPERTS = weights(
    {},
    "model.layers.{}.block_sparse_moe",
    {
        "router": "gate",
        "experts.{}.gate": "experts.{}.w1",
        "experts.{}.up": "experts.{}.w3",
        "experts.{}.down": "experts.{}.w2",
    },
)

MIXTRAL = Family(
    "mixtral",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("MixtralForCausalLM", "mixtral"),
        spec=_config_spec,
        tensors=half_split(from_config.TENSORS | _EXPERTS),
    ),
)
