"""The Command family: Command-R (Cohere 2024) and Command R7B.

Attention and MLP are parallel, after one LayerNorm; logits are scaled. In R7B, only layers with a
window rotate.
"""

from dataclasses import replace

from headrace.model import from_config, from_gguf
from headrace.model.decoder import decoder, parallel
from headrace.model.family import ConfigLayout, Family, GgufLayout, Tensors
from headrace.model.fields import Fields
from headrace.model.spec import ModelSpec

_PERIOD = 4


def _config_spec(config: Fields, architecture: str) -> ModelSpec:
    spec = from_config.decoder_spec(
        config,
        architecture,
        max_context=8192,
        eps_field="layer_norm_eps",
        default_eps=1e-5,
        tied=True,
        computed=("attention_bias", "logit_scale", "use_qk_norm"),
    )
    bias = config.flag("attention_bias", False)
    scale = config.number("logit_scale", 0.0625)
    return replace(spec, norm="layer", qkv_bias=bias, output_bias=bias, logit_scale=scale)


def _cohere_config(config: Fields) -> ModelSpec:
    return replace(
        _config_spec(config, "cohere"),
        qk_norm="heads" if config.flag("use_qk_norm", False) else "none",
    )


def _cohere2_config(config: Fields) -> ModelSpec:
    config.require_neutral({"use_qk_norm": (False,)})
    windows = from_config.layer_windows(config, config.integer("sliding_window", 4096), _PERIOD)
    return replace(
        _config_spec(config, "cohere2"),
        windows=windows,
        rotated=tuple(window > 0 for window in windows),
    )


def _gguf_spec(fields: Fields, tensors: Tensors, architecture: str) -> ModelSpec:
    spec = from_gguf.decoder_spec(fields, tensors, architecture, computed=("logit_scale",))
    return replace(spec, logit_scale=fields.number(f"{architecture}.logit_scale", 1.0))


def _cohere_gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = _gguf_spec(fields, tensors, "command-r")
    return replace(
        spec,
        architecture="cohere",
        qk_norm="heads" if "blk.0.attn_q_norm.weight" in tensors else "none",
    )


def _cohere2_gguf(fields: Fields, tensors: Tensors) -> ModelSpec:
    spec = _gguf_spec(fields, tensors, "cohere2")
    window = fields.integer("cohere2.attention.sliding_window", 4096)
    windows = tuple(window if (layer + 1) % _PERIOD else 0 for layer in range(spec.num_layers))
    return replace(spec, windows=windows, rotated=tuple(window > 0 for window in windows))


COHERE = Family(
    "cohere",
    decoder(parallel),
    config=ConfigLayout(
        architectures=("CohereForCausalLM", "cohere"),
        spec=_cohere_config,
        tensors=from_config.TENSORS,
    ),
    gguf=GgufLayout(architectures=("command-r",), spec=_cohere_gguf, tensors=from_gguf.TENSORS),
)
COHERE2 = Family(
    "cohere2",
    decoder(parallel),
    config=ConfigLayout(
        architectures=("Cohere2ForCausalLM", "cohere2"),
        spec=_cohere2_config,
        tensors=from_config.TENSORS,
    ),
    gguf=GgufLayout(architectures=("cohere2",), spec=_cohere2_gguf, tensors=from_gguf.TENSORS),
)
