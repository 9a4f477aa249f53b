"""gpt-oss (2025): windows in every second layer, attention sinks, experts with clamped gates."""

from dataclasses import replace
from functools import partial

import numpy as np

from headrace.model import from_config, from_gguf
from headrace.model.decoder import decoder, sequential
from headrace.model.family import (
    ConfigLayout,
    Family,
    GgufLayout,
    Indices,
    Rows,
    Tensors,
    TensorSource,
)
from headrace.model.fields import Fields
from headrace.model.sources import half_split, weights
from headrace.model.spec import ExpertSpec, ModelSpec, RopeSpec, layer_range


def _config(config: Fields) -> ModelSpec:
    config.require_neutral({"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)})
    head_dim, context = (
        config.integer("head_dim", 64),
        config.integer("max_position_embeddings", 131_072),
    )
    rope = from_config.rope_spec(config, head_dim, context, theta=150_000.0)
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        rope = RopeSpec(
            dim=head_dim,
            theta=rope.theta,
            scaling="yarn",
            factor=32.0,
            original_context=4096,
            truncate=False,
        )
    spec = from_config.decoder_spec(
        config,
        "gpt_oss",
        max_context=context,
        kv_heads=8,
        head_dim=64,
        default_eps=1e-5,
        rope=rope,
        computed=("attention_bias", "num_local_experts"),
    )
    windows = from_config.layer_windows(config, config.integer("sliding_window", 128), 2)
    bias = config.flag("attention_bias", True)
    experts = ExpertSpec(
        num_experts=config.integer("num_local_experts", 128),
        top_k=config.integer("num_experts_per_tok", 4),
        ffn_dim=spec.ffn_dim,
    )
    return _with_experts(replace(spec, qkv_bias=bias, output_bias=bias), windows, experts)


def _gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, "gpt-oss", computed=("expert_count",))
    window = fields.integer("gpt-oss.attention.sliding_window", 128)
    windows = tuple(0 if layer % 2 else window for layer in layer_range(spec.num_layers))
    experts = from_gguf.expert_spec(fields, tensors, "gpt-oss", spec)
    rope = replace(spec.rope, truncate=False) if spec.rope else None
    return _with_experts(replace(spec, architecture="gpt_oss", rope=rope), windows, experts)


def _with_experts(spec: ModelSpec, windows: tuple[int, ...], experts: ExpertSpec) -> ModelSpec:
    experts = replace(experts, bias=True, router_bias=True)
    return replace(
        spec,
        windows=windows if any(windows) else (),
        sinks=True,
        activation="clamped_swiglu",
        experts=experts,
    )


def _slab_rows(part: str, spec: ModelSpec, indices: Indices) -> Rows:
    assert spec.experts
    _, expert = indices
    num_rows = spec.experts.ffn_dim if part == "down" else spec.dim
    return np.arange(num_rows) + expert * num_rows


def _part_rows(part: str, is_slab: bool, spec: ModelSpec, indices: Indices) -> Rows:
    """The rows of an expert's part. Gate and up alternate, the gate first."""
    assert spec.experts
    _, expert = indices
    num_rows = spec.dim if part == "down" else 2 * spec.experts.ffn_dim
    first = 0 if is_slab else expert * num_rows
    if part == "down":
        return first + np.arange(num_rows)
    return first + np.arange(part == "up", num_rows, 2)


_EXPERTS = "model.layers.{}.mlp.experts"
_FILE_NAMES = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
_CONFIG_TENSORS = {
    **half_split(from_config.TENSORS),
    **weights({}, "model.layers.{}", {"router": "mlp.router"}),
    "layers.{}.sinks": TensorSource("model.layers.{}.self_attn.sinks"),
    **{
        f"layers.{{}}.experts.{{}}.{part}": TensorSource(
            f"{_EXPERTS}.{name}",
            None if part == "down" else partial(_part_rows, part, True),
            transposed=True,
            slab=partial(_slab_rows, part),
        )
        for part, name in _FILE_NAMES.items()
    },
    **{
        f"layers.{{}}.experts.{{}}.{part}_bias": TensorSource(
            f"{_EXPERTS}.{name}_bias", partial(_part_rows, part, False)
        )
        for part, name in _FILE_NAMES.items()
    },
}
_MXFP4_TENSORS = {
    f"layers.{{}}.experts.{{}}.{part}": TensorSource(
        f"{_EXPERTS}.{name}_blocks", partial(_part_rows, part, False)
    )
    for part, name in _FILE_NAMES.items()
}

GPT_OSS = Family(
    "gpt_oss",
    decoder(sequential),
    config=ConfigLayout(
        architectures=("GptOssForCausalLM", "gpt_oss"),
        spec=_config,
        tensors=_CONFIG_TENSORS,
        alternatives=(_MXFP4_TENSORS,),
    ),
    gguf=GgufLayout(
        architectures=("gpt-oss",),
        spec=_gguf,
        tensors=half_split(
            from_gguf.TENSORS
            | from_gguf.EXPERTS
            | weights({}, "blk.{}", {"mlp_norm": "post_attention_norm"})
        ),
    ),
)
