import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.checkpoint.folder import chat_template, open_folder
from headrace.checkpoint.gguf import read_gguf
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.errors import FormatError, ModelError, ModelNotFoundError, UnsupportedModelError
from headrace.model.rope import inverse_frequencies
from headrace.model.spec import ModelSpec, RopeSpec

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama 2": LlamaConfig(**SIZES, max_position_embeddings=512),
    "llama 3": LlamaConfig(
        **SIZES,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters=LLAMA3 | {"rope_theta": 5e5},
    ),
    "llama, biases": LlamaConfig(
        **SIZES, num_key_value_heads=1, attention_bias=True, mlp_bias=True, head_dim=32
    ),
    "smollm2, tied": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "mistral, window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=16),
    "mistral, no window": MistralConfig(
        **SIZES, num_key_value_heads=2, sliding_window=None, head_dim=8
    ),
    "qwen2": Qwen2Config(
        **SIZES, num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=YARN
    ),
    "qwen2, windows": Qwen2Config(
        **SIZES,
        num_key_value_heads=4,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Checkpoint]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param])
    for name, parameter in model.named_parameters():  # biases start as zeros, norms as ones
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name))
    model.save_pretrained(tmp_path)
    return model, open_checkpoint(tmp_path)


def half_split_rows(spec: ModelSpec, heads: int) -> NDArray[np.int64]:
    """The rows that make an interleaved matrix half-split again."""
    pair, head = np.arange(spec.head_dim // 2), np.arange(heads)[:, None] * spec.head_dim
    return np.concatenate([head + 2 * pair, head + 2 * pair + 1], axis=1).reshape(-1)


class TestHuggingFace:
    def test_spec(self, family: tuple[Any, Checkpoint]) -> None:
        model, checkpoint = family
        config, spec = model.config, checkpoint.spec
        assert spec.architecture == config.model_type
        sizes = (
            spec.num_layers,
            spec.dim,
            spec.num_heads,
            spec.num_kv_heads,
            spec.ffn_dim,
            spec.vocab_size,
            spec.max_context,
        )
        assert sizes == (
            3,
            64,
            4,
            config.num_key_value_heads,
            96,
            96,
            config.max_position_embeddings,
        )
        attention = model.model.layers[0].self_attn
        assert spec.head_dim == attention.head_dim
        assert spec.norm_eps == config.rms_norm_eps
        assert spec.tied_embeddings == config.tie_word_embeddings
        assert spec.qkv_bias == (attention.q_proj.bias is not None)
        assert spec.output_bias == (attention.o_proj.bias is not None)
        assert spec.mlp_bias == (model.model.layers[0].mlp.up_proj.bias is not None)
        for layer in range(spec.num_layers):
            window = (
                getattr(model.model.layers[layer].self_attn, "sliding_window", None)
                if config.model_type == "qwen2"
                else None
            )
            window = config.sliding_window if config.model_type == "mistral" else window
            assert spec.window(layer) == (window or 0)

    def test_rotary_frequencies(self, family: tuple[Any, Checkpoint]) -> None:
        model, checkpoint = family
        frequencies, scale = inverse_frequencies(
            checkpoint.spec.rope, checkpoint.spec.max_context, checkpoint.spec.max_context
        )
        np.testing.assert_allclose(
            frequencies, model.model.rotary_emb.inv_freq.double().numpy(), rtol=2e-6
        )
        assert scale == pytest.approx(model.model.rotary_emb.attention_scaling)

    def test_tensors(self, family: tuple[Any, Checkpoint]) -> None:
        model, checkpoint = family
        spec, state = (
            checkpoint.spec,
            {name: value.numpy() for name, value in model.state_dict().items()},
        )
        places = {
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
        }
        places |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
        places |= {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        top = {
            "embed": "model.embed_tokens.weight",
            "norm": "model.norm.weight",
            "head": "lm_head.weight",
        }
        assert ("head" in checkpoint.tensors) != spec.tied_embeddings
        for name, tensor in checkpoint.tensors.items():
            assert tensor.name == name
            if name in top:
                source = top[name]
            else:
                _, layer, part = name.split(".")
                source = f"model.layers.{layer}.{places[part.removesuffix('_bias')]}.{'bias' if part.endswith('_bias') else 'weight'}"  # noqa: E501
            values = tensor.dequantise()
            if (part := name.rpartition(".")[2].removesuffix("_bias")) in ("q", "k"):
                values = values[
                    half_split_rows(spec, spec.num_heads if part == "q" else spec.num_kv_heads)
                ]
            np.testing.assert_array_equal(values, state[source])

    def test_interleaved_pairs_turn_as_half_split_ones(
        self, family: tuple[Any, Checkpoint]
    ) -> None:
        """Scores of rotated queries and keys are equal in both layouts."""
        _, checkpoint = family
        spec = checkpoint.spec
        rng = np.random.default_rng(0)
        query, key = rng.normal(size=(2, spec.head_dim))
        angle = 5 * inverse_frequencies(spec.rope, spec.max_context, spec.max_context)[0]
        order = half_split_rows(spec, 1)

        def turn(
            x: NDArray[np.float64], first: NDArray[np.int64], second: NDArray[np.int64]
        ) -> NDArray[np.float64]:
            out = np.empty_like(x)
            out[first] = x[first] * np.cos(angle) - x[second] * np.sin(angle)
            out[second] = x[second] * np.cos(angle) + x[first] * np.sin(angle)
            return out

        half = np.arange(spec.head_dim // 2)
        half_split = turn(query[order], half, half + spec.head_dim // 2) @ key[order]
        assert turn(query, 2 * half, 2 * half + 1) @ key == pytest.approx(half_split)

    def test_old_spellings(self, tmp_path: Path) -> None:
        """`rope_scaling` with `type`, the spelling of transformers 4."""
        old = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000.0}
        assert spec_of(tmp_path, old).rope == RopeSpec(16, 5000.0, "linear", 2.0)
        old = {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "finetuned": True,
            }
        }
        assert spec_of(tmp_path, old).rope == RopeSpec(
            dim=16, theta=10000.0, scaling="yarn", factor=4.0, original_context=32
        )
        attach = {
            "rope_scaling": {"rope_type": "yarn", "factor": None},
            "original_max_position_embeddings": 512,
        }
        assert spec_of(tmp_path, attach).rope == RopeSpec(
            dim=16, theta=10000.0, scaling="yarn", factor=4.0, original_context=512
        )

    def test_defaults_are_those_of_transformers(self, tmp_path: Path) -> None:
        for architecture, family in (
            ("LlamaForCausalLM", "llama"),
            ("MistralForCausalLM", "mistral"),
            ("Qwen2ForCausalLM", "qwen2"),
        ):
            config = AutoConfig.for_model(family)
            wide = {
                "hidden_size": 512,
                "num_attention_heads": 32,
                "architectures": [architecture],
                "model_type": family,
            }
            spec = spec_of(tmp_path, wide)
            assert (spec.num_kv_heads, spec.max_context, spec.norm_eps) == (
                config.num_key_value_heads,
                config.max_position_embeddings,
                config.rms_norm_eps,
            )
            assert spec.window(0) == (config.sliding_window or 0 if family == "mistral" else 0)
            assert spec.rope.theta == config.rope_parameters["rope_theta"]


CONFIG = {
    **SIZES,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
}


def spec_of(folder: Path, change: dict[str, Any]) -> ModelSpec:
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in (CONFIG | change).items() if value != "absent"})
    )
    return open_folder(folder).spec


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 4}
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["XGLMForCausalLM"]}, "XGLMForCausalLM.*LlamaForCausalLM"),
    ({"architectures": None, "model_type": "xglm"}, "xglm"),
    ({"hidden_act": "tanh"}, "hidden_act"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5 is not supported"),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"rope_scaling": {"type": "proportional", "factor": 2.0}}, r"rope_type = proportional"),
    ({"rope_parameters": {"rope_type": "default", "sections": [1, 2]}}, "rope_parameters.sections"),
    ({"rope_parameters": {"chunked_attention": {"factor": 2.0}}}, "chunked_attention"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
    (
        {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 3},
        "layer_types",
    ),
]

MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "absent"}, "hidden_size is missing"),
    ({"hidden_size": "64"}, "hidden_size must be an integer"),
    ({"hidden_size": True}, "hidden_size must be an integer"),
    ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rope_theta": float("inf")}, "rope_theta"),
    ({"rope_scaling": [1]}, "rope_scaling must be an object"),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, r"factor is 0\.0, but must be positive"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
]

IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 0}, "num_layers is 0"),
    ({"num_hidden_layers": 2**31 - 1}, "layers"),
    ({"num_attention_heads": -4}, "num_heads"),
    ({"num_attention_heads": 2**30, "head_dim": 2**20}, "heads of"),
    ({"num_key_value_heads": 3}, "evenly"),
    ({"head_dim": 15}, "15 rotary dimensions"),
    ({"rms_norm_eps": -1}, "epsilon"),
    ({"rope_theta": 0.5}, "rotary base"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
    ({"rope_scaling": YARN | {"beta_fast": -1}}, "beta_fast"),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}},
        "factors of both kinds",
    ),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "1 rotary factors for 8 pairs",
    ),
    (MIXTRAL | {"num_local_experts": 2, "num_experts_per_tok": 3}, "3 of 2 experts"),
    (
        MIXTRAL | {"num_local_experts": 4000, "num_hidden_layers": 4000},
        "4,000 experts in 4,000 layers",
    ),
    (
        {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4, "sliding_window": -5},
        "sliding window",
    ),
]


FIELDS = [
    *SIZES, "head_dim", "num_key_value_heads", "rope_scaling", "rope_theta", "architectures",
    "layer_types", "hidden_act", "sliding_window",
    "use_sliding_window", "max_window_layers", "max_position_embeddings", "rms_norm_eps",
    "attention_bias",
]  # fmt: skip


class TestConfigs:
    @pytest.mark.parametrize(("change", "message"), UNSUPPORTED)
    def test_unsupported(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        with pytest.raises(UnsupportedModelError, match=message):
            spec_of(tmp_path, change)

    @pytest.mark.parametrize(("change", "message"), MALFORMED)
    def test_malformed(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        with pytest.raises(FormatError, match=message):
            spec_of(tmp_path, change)

    @pytest.mark.parametrize(("change", "message"), IMPOSSIBLE)
    def test_impossible(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        spec_of(tmp_path, change)
        with pytest.raises(FormatError, match=message):
            open_checkpoint(tmp_path)

    @settings(
        max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
    )
    @given(
        key=st.sampled_from(FIELDS),
        value=st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["type", "rope_type", "factor", "low_freq_factor", "high_freq_factor"]
                    ),
                    inner,
                )
            ),
            max_leaves=4,
        ),
        architecture=st.sampled_from(
            ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"]
        ),
    )
    def test_any_value_anywhere(
        self, tmp_path: Path, key: str, value: Any, architecture: str
    ) -> None:
        (tmp_path / "config.json").write_text(
            json.dumps(CONFIG | {"architectures": [architecture], key: value})
        )
        with pytest.raises(ModelError):  # at the latest for want of weights
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("content", ["", "[]", "{", "[" * 10_000, "\xff"])
    def test_not_an_object(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(FormatError, match=r"config\.json"):
            open_checkpoint(tmp_path)

    def test_repository_code_is_ignored(self, tmp_path: Path) -> None:
        (tmp_path / "modeling_evil.py").write_text("open('canary', 'w')")
        assert (
            spec_of(
                tmp_path, {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
            ).num_layers
            == 3
        )
        assert not Path("canary").exists()

    def test_chat_templates(self, tmp_path: Path) -> None:
        assert chat_template(tmp_path) is None
        config = tmp_path / "tokenizer_config.json"
        config.write_text(json.dumps({"chat_template": "plain"}))
        assert chat_template(tmp_path) == "plain"
        config.write_text(
            json.dumps(
                {
                    "chat_template": [
                        {"name": "tool_use", "template": "a"},
                        {"name": "default", "template": "b"},
                    ]
                }
            )
        )
        assert chat_template(tmp_path) == "b"
        config.write_text(json.dumps({"chat_template": 3}))
        with pytest.raises(FormatError, match="chat_template"):
            chat_template(tmp_path)
        (tmp_path / "chat_template.jinja").write_text("from a file")
        assert chat_template(tmp_path) == "from a file"


class TestGguf:
    def test_the_default_model(self, smollm2: Path) -> None:
        checkpoint = open_checkpoint(smollm2)
        spec = checkpoint.spec
        assert (spec.num_layers, spec.dim, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
            30,
            576,
            9,
            3,
            64,
        )
        assert (spec.ffn_dim, spec.vocab_size, spec.max_context) == (1536, 49152, 8192)
        assert spec.rope == RopeSpec(64, 100000.0)
        assert spec.tied_embeddings
        assert len(checkpoint.tensors) == 2 + 30 * 9
        assert {
            tensor.format.name for name, tensor in checkpoint.tensors.items() if name.endswith(".q")
        } == {"Q4_1"}
        assert checkpoint.chat_template is not None
        assert "<|im_start|>" in checkpoint.chat_template

    def test_llama_rows_stay_as_they_are(self, write_gguf: Any) -> None:
        checkpoint = open_checkpoint(write_gguf())
        assert checkpoint.tensors["layers.1.q"].row_order is None
        assert not checkpoint.spec.qkv_bias

    @pytest.mark.parametrize("rope_dim", [16, 8])
    def test_qwen2_rows_are_interleaved(self, write_gguf: Any, rope_dim: int) -> None:
        path = write_gguf({"qwen2.rope.dimension_count": rope_dim}, architecture="qwen2")
        stored, checkpoint = read_gguf(path).tensors, open_checkpoint(path)
        assert checkpoint.spec.qkv_bias
        assert not checkpoint.spec.output_bias
        pairs = [(i, i + rope_dim // 2) for i in range(rope_dim // 2)]
        rows = [row for pair in pairs for row in pair] + list(range(rope_dim, 16))
        for part, source, heads in (
            ("q", "q.weight", 4),
            ("k", "k.weight", 2),
            ("q_bias", "q.bias", 4),
            ("k_bias", "k.bias", 2),
        ):
            found = checkpoint.tensors[f"layers.1.{part}"].dequantise().reshape(heads, 16, -1)
            np.testing.assert_array_equal(
                found, stored[f"blk.1.attn_{source}"].dequantise().reshape(heads, 16, -1)[:, rows]
            )
        assert checkpoint.tensors["layers.0.v"].row_order is None

    @pytest.mark.parametrize(
        ("change", "rope"),
        [
            ({}, RopeSpec(16)),
            ({"llama.rope.dimension_count": 8}, RopeSpec(8)),
            (
                {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
                RopeSpec(16, scaling="linear", factor=4.0),
            ),
            ({"llama.rope.scale_linear": 2.0}, RopeSpec(16, scaling="linear", factor=2.0)),
            ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, RopeSpec(16)),
            ({"llama.rope.scaling.attn_factor": 1.25}, RopeSpec(16, attention_factor=1.25)),
            ({"llama.rope.scaling.finetuned": True}, RopeSpec(16)),
        ],
    )
    def test_rope(self, write_gguf: Any, change: dict[str, Any], rope: RopeSpec) -> None:
        assert open_checkpoint(write_gguf(change)).spec.rope == rope

    def test_yarn(self, write_gguf: Any) -> None:
        keys = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
        rope = open_checkpoint(
            write_gguf({f"llama.rope.scaling.{key}": value for key, value in keys.items()})
        ).spec.rope
        parameters = {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        }
        config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters)
        expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        frequencies, scale = inverse_frequencies(rope, 256, 256)
        np.testing.assert_allclose(frequencies, expected.double().numpy(), rtol=2e-6)
        assert scale == pytest.approx(factor)

    @pytest.mark.parametrize(
        ("keys", "scale"),
        [
            ({}, 0.1 * math.log(4) + 1),
            ({"attn_factor": 0.5}, 0.5 * (0.1 * math.log(4) + 1)),
            ({"yarn_log_multiplier": 1.0}, 1.0),
            (
                {"yarn_log_multiplier": 0.5},
                (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
            ),
        ],
    )
    def test_yarn_as_llama_cpp_computes_it(
        self, write_gguf: Any, keys: dict[str, float], scale: float
    ) -> None:
        yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 256} | keys
        change = {f"llama.rope.scaling.{key}": value for key, value in yarn.items()}
        spec = open_checkpoint(write_gguf(change)).spec
        assert spec.max_context == 1024
        assert inverse_frequencies(spec.rope, 1024, 1024)[1] == pytest.approx(scale)

    def test_longrope_factors_of_any_family(self, write_gguf: Any) -> None:
        short, long = np.linspace(1, 2, 8), np.linspace(2, 9, 8)
        change = {
            "llama.rope.scaling.type": "longrope",
            "llama.rope.scaling.original_context_length": 64,
        }
        weights = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
        weights = {name: values.astype(np.float32) for name, values in weights.items()}
        rope = open_checkpoint(write_gguf(change, weights)).spec.rope
        assert rope.scaling == "longrope" and rope.original_context == 64
        assert rope.factors == tuple(weights["rope_factors_short.weight"].tolist())
        assert inverse_frequencies(rope, 256, 256)[0][0] == pytest.approx(0.5)

    def test_factors_of_llama3(self, write_gguf: Any) -> None:
        factors = np.linspace(1, 8, 8, dtype=np.float32)
        assert open_checkpoint(
            write_gguf(weights={"rope_freqs.weight": factors})
        ).spec.rope.factors == tuple(factors.tolist())
        with pytest.raises(FormatError, match="7 rotary factors for 8 pairs"):
            open_checkpoint(write_gguf(weights={"rope_freqs.weight": factors[:7]}))

    def test_window_of_mistral(self, write_gguf: Any) -> None:
        assert open_checkpoint(write_gguf({"llama.attention.sliding_window": 16})).spec.windows == (
            16,
            16,
        )

    def test_heads_given_for_each_layer(self, write_gguf: Any) -> None:
        assert (
            open_checkpoint(write_gguf({"llama.attention.head_count_kv": [2, 2]})).spec.num_kv_heads
            == 2
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"general.architecture": "gemma"},
                "unknown architecture 'gemma'; the nearest known architecture, .* has all",
            ),
            *(
                ({"general.architecture": name}, f"'{name}' is an encoder.*use a decoder")
                for name in ("bert", "nomic-bert", "BertModel", "MPNetModel", "XLMRobertaModel")
            ),
            ({"llama.expert_group_count": 8}, "llama.expert_group_count"),
            ({"llama.attention.causal": False}, "attention.causal"),
            ({"llama.attn_logit_softcapping": 50.0}, "softcapping"),
            ({"llama.rope.scaling.type": "longrope"}, "longrope"),
            ({"llama.rope.scaling.yarn_attn_factor": 1.2}, "yarn_attn_factor"),
            ({"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
            ({"llama.attention.value_length": 8}, "value_length"),
            ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv differs"),
        ],
    )
    def test_unsupported(self, write_gguf: Any, change: dict[str, Any], message: str) -> None:
        with pytest.raises(UnsupportedModelError, match=message):
            open_checkpoint(write_gguf(change))

    def test_missing_key(self, write_gguf: Any) -> None:
        with pytest.raises(FormatError, match=r"llama\.block_count is missing"):
            open_checkpoint(write_gguf({"llama.block_count": None}))

    def test_missing_tensor(self, write_gguf: Any) -> None:
        with pytest.raises(
            FormatError, match=r"blk\.1\.ffn_up\.weight is missing; expected shape \[96, 64\]"
        ):
            open_checkpoint(write_gguf(weights={"blk.1.ffn_up.weight": None}))
        with pytest.raises(FormatError, match=r"token_embd\.weight is missing"):
            open_checkpoint(write_gguf(weights={"token_embd.weight": None}))

    def test_wrong_shape(self, write_gguf: Any) -> None:
        with pytest.raises(
            FormatError, match=r"blk\.0\.attn_k\.weight has shape \[16, 64\], expected \[32, 64\]"
        ):
            open_checkpoint(
                write_gguf(weights={"blk.0.attn_k.weight": np.zeros((16, 64), np.float32)})
            )

    def test_an_unknown_tensor(self, write_gguf: Any) -> None:
        with pytest.raises(
            UnsupportedModelError, match=r"blk\.0\.attn_q_norm\.weight is not a tensor"
        ):
            open_checkpoint(
                write_gguf(weights={"blk.0.attn_q_norm.weight": np.ones(16, np.float32)})
            )


class TestPaths:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError):
            open_checkpoint(tmp_path / "none.gguf")
        with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
            open_checkpoint(tmp_path)

    def test_a_folder_of_one_gguf_file(self, write_gguf: Callable[..., Path]) -> None:
        path = write_gguf()
        assert open_checkpoint(path.parent).path == path

    @pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
    def test_pickles(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"model{suffix}"
        path.write_bytes(b"\x80\x04")
        with pytest.raises(UnsupportedModelError, match="safetensors"):
            open_checkpoint(path)

    def test_weights_without_their_folder(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", 2) + b"{}")
        with pytest.raises(FormatError, match="folder"):
            open_checkpoint(path)
