"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP in parallel; partly rotated heads."""

from dataclasses import replace

from headrace.model import from_config
from headrace.model.decoder import decoder, parallel
from headrace.model.family import ConfigLayout, Family
from headrace.model.fields import Fields
from headrace.model.gpt2 import FIELDS
from headrace.model.sources import weights
from headrace.model.spec import ModelSpec, RopeSpec


def _config_spec(config: Fields) -> ModelSpec:
    spec = from_config.decoder_spec(
        config,
        "gptj",
        max_context=2048,
        eps_field="layer_norm_eps",
        default_eps=1e-5,
        computed=("hidden_act",),
    )
    return replace(
        spec,
        rope=RopeSpec(config.integer("rotary_dim", 64)),
        norm="layer",
        gated_mlp=False,
        activation=from_config.activation(config, "hidden_act", "gelu_new"),
        norm_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


GPTJ = Family(
    "gptj",
    decoder(parallel),
    config=ConfigLayout(
        architectures=("GPTJForCausalLM", "gptj"),
        spec=_config_spec,
        tensors=weights(
            {"embed": "transformer.wte", "head": "lm_head", "norm": "transformer.ln_f"},
            "transformer.h.{}",
            {
                "attn_norm": "ln_1",
                "q": "attn.q_proj",
                "k": "attn.k_proj",
                "v": "attn.v_proj",
                "o": "attn.out_proj",
                "up": "mlp.fc_in",
                "down": "mlp.fc_out",
            },
        ),
        ignored=(".attn.bias", ".attn.masked_bias"),
        fields=FIELDS,
    ),
)
