"""The StableLM family (Stability AI 2023-2024): Llama with LayerNorm and partly rotated heads."""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.decoder import by_spec, decoder
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.sources import half_split
from headrace.model.spec import ModelSpec


def _config_spec(config: Fields) -> ModelSpec:
    spec = from_config.decoder_spec(
        config,
        "stablelm",
        max_context=4096,
        kv_heads=32,
        partial=0.25,
        eps_field="layer_norm_eps",
        default_eps=1e-5,
    )
    return replace(
        spec,
        norm="layer",
        norm_bias=True,
        qkv_bias=config.flag("use_qkv_bias", False),
        block="parallel" if config.flag("use_parallel_residual", False) else "sequential",
    )


def _gguf_spec(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "stablelm", computed=("use_parallel_residual",))
    parallel = "blk.0.ffn_norm.weight" not in tensors
    return replace(spec, block="parallel" if parallel else "sequential")


STABLELM = Family(
    "stablelm",
    decoder(by_spec),
    config=ConfigLayout(
        architectures=("StableLmForCausalLM", "stablelm"),
        spec=_config_spec,
        tensors=half_split(from_config.TENSORS),
    ),
    gguf=GgufLayout(
        architectures=("stablelm",), spec=_gguf_spec, tensors=half_split(from_gguf.TENSORS)
    ),
)
