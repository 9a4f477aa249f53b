"""The GPT-2 family: GPT-2 (Radford et al. 2019), and GPT-BigCode with StarCoder (Li et al. 2023).

GPT-2 files store transposed matrices; GPT-BigCode has one KV head.
"""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.decoder import decoder, sequential
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors, TensorSource
from headrace.model.fields import Fields
from headrace.model.sources import fused_qkv, weights
from headrace.model.spec import ModelSpec

FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}
_IGNORED = (".attn.bias", ".attn.masked_bias")
"""Attention masks in old files."""


def _config_spec(
    config: Fields, architecture: str, activation: str, kv_heads: int | None
) -> ModelSpec:
    config.require_neutral(
        {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        }
    )
    spec = from_config.decoder_spec(
        config,
        architecture,
        max_context=1024,
        eps_field="layer_norm_eps",
        default_eps=1e-5,
        tied=True,
        computed=("hidden_act",),
    )
    spec = replace(
        spec,
        num_kv_heads=kv_heads or spec.num_heads,
        activation=from_config.activation(config, "hidden_act", activation),
    )
    return _as_gpt2(spec)


def _as_gpt2(spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        rope=None,
        learned_positions=spec.max_context,
        norm="layer",
        gated_mlp=False,
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def _gpt2_config(config: Fields) -> ModelSpec:
    return _config_spec(config, "gpt2", "gelu_new", None)


def _bigcode_config(config: Fields) -> ModelSpec:
    config.require_neutral({"multi_query": (True,)})
    return _config_spec(config, "gpt_bigcode", "gelu_pytorch_tanh", 1)


def _gguf_spec(fields: Fields, tensors: Tensors, architecture: str) -> ModelSpec:
    return _as_gpt2(
        replace(from_gguf.decoder_spec(fields, tensors, architecture), activation="gelu_tanh")
    )


def _gpt2_gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    return _gguf_spec(fields, tensors, "gpt2")


def _starcoder_gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    return replace(_gguf_spec(fields, tensors, "starcoder"), architecture="gpt_bigcode")


def _config_tensors(transposed: bool) -> dict[str, TensorSource]:
    names = weights(
        {
            "embed": "transformer.wte",
            "positions": "transformer.wpe",
            "head": "lm_head",
            "norm": "transformer.ln_f",
        },
        "transformer.h.{}",
        {
            "attn_norm": "ln_1",
            "o": "attn.c_proj",
            "mlp_norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
    )
    matrices = {f"layers.{{}}.{name}" for name in ("o", "up", "down")} if transposed else set()
    names = {ours: replace(stored, transposed=ours in matrices) for ours, stored in names.items()}
    attention = "transformer.h.{}.attn.c_attn"
    return names | fused_qkv(
        f"{attention}.weight",
        "blocks",
        is_half_split=False,
        bias=f"{attention}.bias",
        transposed=transposed,
    )


_GGUF_TENSORS = from_gguf.TENSORS | fused_qkv(
    "blk.{}.attn_qkv.weight", "blocks", is_half_split=False, bias="blk.{}.attn_qkv.bias"
)

GPT2 = Family(
    "gpt2",
    decoder(sequential),
    config=ConfigLayout(
        architectures=("GPT2LMHeadModel", "gpt2"),
        spec=_gpt2_config,
        tensors=_config_tensors(transposed=True),
        ignored=_IGNORED,
        fields=FIELDS,
    ),
    gguf=GgufLayout(architectures=("gpt2",), spec=_gpt2_gguf, tensors=_GGUF_TENSORS),
)
GPT_BIGCODE = Family(
    "gpt_bigcode",
    decoder(sequential),
    config=ConfigLayout(
        architectures=("GPTBigCodeForCausalLM", "gpt_bigcode"),
        spec=_bigcode_config,
        tensors=_config_tensors(transposed=False),
        ignored=_IGNORED,
        fields=FIELDS,
    ),
    gguf=GgufLayout(architectures=("starcoder",), spec=_starcoder_gguf, tensors=_GGUF_TENSORS),
)
