"""OPT (Zhang et al. 2022): ReLU, LayerNorm, learned positions, biases everywhere."""

from dataclasses import replace

from headrace.model import from_config, llama
from headrace.model.family import ConfigLayout, Family, TensorSource
from headrace.model.fields import Fields
from headrace.model.sources import weights
from headrace.model.spec import ModelSpec

_FIRST_POSITION = 2
"""The stored row of position 0; the rows before it belong to padding."""


def _config_spec(config: Fields) -> ModelSpec:
    # OPT-350M alone has norms after its parts, and projects embeddings of 512 numbers.
    config.require_neutral(
        {
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
            "word_embed_proj_dim": (config.integer("hidden_size"),),
        }
    )
    spec = from_config.decoder_spec(
        config,
        "opt",
        max_context=2048,
        eps_field="layer_norm_eps",
        default_eps=1e-5,
        tied=True,
        computed=("hidden_act",),
    )
    bias = config.flag("enable_bias", True)
    return replace(
        spec,
        rope=None,
        learned_positions=spec.max_context,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        gated_mlp=False,
        activation=from_config.activation(config, "hidden_act", "relu"),
    )


_TENSORS = weights(
    {
        "embed": "model.decoder.embed_tokens",
        "head": "lm_head",
        "norm": "model.decoder.final_layer_norm",
    },
    "model.decoder.layers.{}",
    {
        "attn_norm": "self_attn_layer_norm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    },
) | {"positions": TensorSource("model.decoder.embed_positions.weight", first_row=_FIRST_POSITION)}

OPT = Family(
    "opt",
    llama.LLAMA.forward,
    config=ConfigLayout(
        architectures=("OPTForCausalLM", "opt"),
        spec=_config_spec,
        tensors=_TENSORS,
        fields={
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
        },
    ),
)
