"""The Phi-3 and Phi-4 family (Abdin et al. 2024): Llama with fused matrices, and longrope."""

from dataclasses import replace

from headrace.model import from_config, from_gguf, llama
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import fused_gate_up, fused_qkv
from headrace.model.spec import ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    windows = from_config.sliding_windows(config, config.integer("sliding_window", 0))
    return from_config.decoder_spec(
        config, "phi3", max_context=4096, windows=windows, default_eps=1e-5, partial=1.0
    )


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "phi3")
    return replace(spec, gated_mlp=True)


PHI3 = Family(
    "phi3",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("Phi3ForCausalLM", "phi3"),
        spec=_config_spec,
        tensors=from_config.TENSORS
        | fused_qkv("model.layers.{}.self_attn.qkv_proj.weight", "blocks")
        | fused_gate_up("model.layers.{}.mlp.gate_up_proj.weight"),
    ),
    gguf=GgufLayout(
        architectures=("phi3",),
        spec=_gguf_spec,
        tensors=from_gguf.TENSORS
        | fused_qkv("blk.{}.attn_qkv.weight", "blocks")
        | fused_gate_up("blk.{}.ffn_up.weight"),
    ),
)
