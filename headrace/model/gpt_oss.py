"""gpt-oss (2025): windows in every second layer, scores that belong to no key, and experts with
clamped gates and biases.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from headrace.model import from_config, from_gguf
from headrace.model.decoder import decoder, sequential
from headrace.model.family import ConfigLayout, Family, GgufLayout, Numbers, Rows, Stored, Tensors
from headrace.model.fields import Fields
from headrace.model.places import half_split, weights
from headrace.model.spec import ExpertSpec, ModelSpec, RopeSpec


def _config(config: Fields) -> ModelSpec:
    config.require_neutral({"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)})
    head_dim, context = (
        config.integer("head_dim", 64),
        config.integer("max_position_embeddings", 131_072),
    )
    rope = from_config.rope(config, head_dim, context, theta=150_000.0)
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        rope = RopeSpec(
            dim=head_dim,
            theta=rope.theta,
            scaling="yarn",
            factor=32.0,
            original_context=4096,
            truncate=False,
        )
    spec = from_config.decoder(
        *(config, "gpt_oss"),
        max_context=context,
        kv_heads=8,
        head_dim=64,
        default_eps=1e-5,
        rotary=rope,
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
    spec = from_gguf.decoder(fields, tensors, "gpt-oss", computed=("expert_count",))
    window = fields.integer("gpt-oss.attention.sliding_window", 128)
    windows = tuple(0 if layer % 2 else window for layer in range(min(spec.num_layers, 1 << 16)))
    experts = from_gguf.experts(fields, tensors, "gpt-oss", spec)
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


def _slab(part: str, spec: ModelSpec, numbers: Numbers) -> Rows:
    """The rows of an expert whose matrices have our columns for rows."""
    assert spec.experts
    rows = spec.experts.ffn_dim if part == "down" else spec.dim
    return np.arange(rows) + numbers[1] * rows


def _share(part: str, is_first: bool, spec: ModelSpec, numbers: Numbers) -> Rows:
    """The rows of an expert, or, with `is_first`, those of the first: gate and up take turns."""
    assert spec.experts
    rows = spec.dim if part == "down" else 2 * spec.experts.ffn_dim
    first = 0 if is_first else numbers[1] * rows
    return first + (np.arange(rows) if part == "down" else np.arange(part == "up", rows, 2))


_EXPERTS = "model.layers.{}.mlp.experts"
_FILE = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
_CONFIG_TENSORS = {
    **half_split(from_config.TENSORS),
    **weights({}, "model.layers.{}", {"router": "mlp.router"}),
    "layers.{}.sinks": Stored("model.layers.{}.self_attn.sinks"),
    **{
        f"layers.{{}}.experts.{{}}.{part}": Stored(
            f"{_EXPERTS}.{name}",
            None if part == "down" else partial(_share, part, True),
            transposed=True,
            slab=partial(_slab, part),
        )
        for part, name in _FILE.items()
    },
    **{
        f"layers.{{}}.experts.{{}}.{part}_bias": Stored(
            f"{_EXPERTS}.{name}_bias", partial(_share, part, False)
        )
        for part, name in _FILE.items()
    },
}
_BLOCKS = {
    f"layers.{{}}.experts.{{}}.{part}": Stored(
        f"{_EXPERTS}.{name}_blocks", partial(_share, part, False)
    )
    for part, name in _FILE.items()
}

GPT_OSS = Family(
    "gpt_oss",
    decoder(sequential),
    config=ConfigLayout(
        architectures=("GptOssForCausalLM", "gpt_oss"),
        spec=_config,
        tensors=_CONFIG_TENSORS,
        others=(_BLOCKS,),
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
