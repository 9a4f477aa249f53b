"""Families have a source for every tensor of every model that they describe."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.load import checked_spec
from headrace.errors import FormatError, UnsupportedModelError
from headrace.model import FAMILIES, tensor_shapes, trace_model
from headrace.model.family import Family, Layout, TensorSource
from headrace.model.fields import JsonFields, shown
from headrace.model.rope import inverse_frequencies
from headrace.model.sources import QkvLayout, fused_qkv, half_split, weights
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.quant.formats import StoredTensor
from tests import family_configs
from tests.families import VARIANTS, spec_of

SPEC = ModelSpec(
    architecture="llama",
    num_layers=2,
    dim=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_dim=1,
    vocab_size=5,
    max_context=16,
    norm_eps=1e-5,
    rope=RopeSpec(4),
)


def layouts(family: Family) -> list[Layout]:
    return [layout for layout in (family.config, family.gguf) if layout]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_has_a_source_in_every_layout(name: str) -> None:
    """The source is a whole tensor or a part of one, and no two of our tensors share rows."""
    family = FAMILIES[VARIANTS[name].family]
    assert family.name == VARIANTS[name].family and family.config
    spec = spec_of(name)
    assert spec.architecture == family.name
    for layout in layouts(family):
        taken = set()
        for tensor in tensor_shapes(spec):
            place, numbers = layout.source_of(tensor)
            first = tuple(
                int(rows(spec, numbers)[0]) if rows else 0 for rows in (place.slab, place.rows)
            )
            assert (place.name, first) not in taken
            assert "{" not in place.name and not place.name.endswith(layout.ignored or ("-",))
            taken.add((place.name, first))


def test_configurations_on_file_are_those_of_transformers() -> None:
    on_file = {name: family_configs.spec_of(name) for name in family_configs.CONFIGS}
    assert on_file == {name: spec_of(name) for name in VARIANTS}


LATENT = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163_840,
}
V2_LITE = LATENT | {
    **{
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "vocab_size": 102_400,
        "num_hidden_layers": 27,
    },
    **{
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
    },
    **{
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    **{
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "attention_bias": False,
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
    },
    "rope_scaling": {
        **{
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "original_max_position_embeddings": 4096,
    },
}
OSS_20B = {
    **{
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "vocab_size": 201_088,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
    },
    **{
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
    },
    **{
        "attention_bias": True,
        "hidden_act": "silu",
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rope_theta": 150_000,
    },
    "rope_scaling": {
        **{
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize(
    ("family", "config", "millions"),
    [("deepseek_v2", V2_LITE, 15_706.5), ("gpt_oss", OSS_20B, 20_914.8)],
)
def test_parameters_of_published_models(
    family: str, config: dict[str, Any], millions: float
) -> None:
    layout = FAMILIES[family].config
    assert layout
    spec = checked_spec(
        layout.spec(JsonFields(config, "config.json").named(layout.fields)), "config.json"
    )
    assert (
        round(sum(math.prod(shape) for shape in tensor_shapes(spec).values()) / 1e6, 1) == millions
    )


def test_yarn_temperature_scales_attention_scores() -> None:
    """DeepSeek multiplies scores with its square; the factors of cosines and sines cancel."""
    layout = FAMILIES["deepseek_v2"].config
    assert layout
    spec = layout.spec(JsonFields(V2_LITE, "config.json"))
    assert spec.attention_scale == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2 / 192**0.5)
    assert spec.rope and inverse_frequencies(spec.rope, 163_840, 163_840)[1] == 1.0


@pytest.mark.parametrize(
    ("family", "config", "field"),
    [
        ("deepseek_v2", V2_LITE | {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", V2_LITE | {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v2", V2_LITE | {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", V2_LITE | {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v2", V2_LITE | {"num_key_value_heads": 8}, "num_key_value_heads"),
        ("deepseek_v3", V2_LITE | {"scoring_func": "softmax"}, "scoring_func"),
        ("gpt_oss", OSS_20B | {"swiglu_limit": 9.0}, "swiglu_limit"),
        ("gpt_oss", OSS_20B | {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_unsupported_config_fields_are_refused_by_name(
    family: str, config: dict[str, Any], field: str
) -> None:
    layout = FAMILIES[family].config
    assert layout
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {field} = "):
        layout.spec(JsonFields(config, "config.json"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 0}, "kv_rank is 0"),
        ({"v_head_dim": -1}, "value_dim is -1"),
        ({"q_lora_rank": -2}, "query_rank is -2"),
        ({"qk_nope_head_dim": 0}, "64 rotated numbers in queries of 64"),
        ({"kv_lora_rank": 1 << 20}, "16 heads over latent rows of 1,048,576"),
        (
            {"num_attention_heads": 1 << 14, "num_key_value_heads": 1 << 14, "qk_nope_head_dim": 0},
            "heads in 27 layers|16,384 heads",
        ),
    ],
)
def test_invalid_mla_sizes_are_refused(change: dict[str, int], message: str) -> None:
    layout = FAMILIES["deepseek_v2"].config
    assert layout
    with pytest.raises(FormatError, match=message):
        checked_spec(layout.spec(JsonFields(V2_LITE | change, "config.json")), "config.json")


def test_architecture_names_are_unique() -> None:
    for kind in ("config", "gguf"):
        claimed = [
            name
            for family in FAMILIES.values()
            if (layout := getattr(family, kind))
            for name in layout.architectures
        ]
        assert len(claimed) == len(set(claimed))


def test_tensor_shapes_equal_the_shapes_that_tracing_checks() -> None:
    spec = replace(SPEC, qkv_bias=True, mlp_bias=True)
    shapes = tensor_shapes(spec)
    assert shapes["embed"] == (5, 8) and shapes["norm"] == (8,)
    assert shapes["layers.1.q_bias"] == (16,) and shapes["layers.0.k"] == (8, 8)
    assert shapes["layers.1.gate"] == (1, 8) and shapes["layers.1.gate_bias"] == (
        1,
    )  # a matrix of one row is no vector
    tensors = {
        name: StoredTensor.from_floats(name, np.zeros(shape, np.float32))
        for name, shape in shapes.items()
    }
    used = {weight.name for op in trace_model(spec, tensors).ops for weight in op.weights()}
    assert used == shapes.keys()
    for name, shape in shapes.items():
        wrong = StoredTensor.from_floats(name, np.zeros((*shape[:-1], shape[-1] + 1), np.float32))
        with pytest.raises(FormatError, match=name):
            trace_model(spec, tensors | {name: wrong})


def test_unknown_architecture() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'hyena'; supported: llama"):
        tensor_shapes(replace(SPEC, architecture="hyena"))


def test_tensor_sources() -> None:
    tensors = {
        "embed": TensorSource("wte"),
        "layers.{}.experts.{}.up": TensorSource("h.{}.mlp.{}.up"),
        "layers.{}.experts.{}.down": TensorSource("h.{}.down"),
    }
    layout = Layout(architectures=("x",), tensors=tensors)
    assert layout.source_of("embed") == (TensorSource("wte"), ())
    assert layout.source_of("layers.3.experts.12.up") == (TensorSource("h.3.mlp.12.up"), (3, 12))
    assert layout.source_of("layers.3.experts.12.down") == (
        TensorSource("h.3.down"),
        (3, 12),
    )  # stacked: the rows go by the second number


def test_half_split_pairs() -> None:
    parts = ("q", "k", "v", "o", "q_norm")
    tensors = half_split(weights({}, "h.{}", {part: part for part in parts}))
    spec = replace(SPEC, head_dim=6, qk_norm="head")
    orders = {
        name.removeprefix("layers.{}."): stored.rows(spec, (0,)).tolist()
        for name, stored in tensors.items()
        if stored.rows
    }
    head = [0, 2, 1, 3, 4, 5]  # of four rotated rows, and two that stay
    assert orders == {
        **{key: [6 * i + row for i in range(4) for row in head] for key in ("q", "q_bias")},
        **{key: [6 * i + row for i in range(2) for row in head] for key in ("k", "k_bias")},
        "q_norm": head,
    }
    own = tensors["layers.{}.q_norm"].rows
    assert own and own(replace(spec, qk_norm="row"), (0,)).tolist() == orders["q"]


@pytest.mark.parametrize(
    ("layout", "heads"),
    [
        ("blocks", {"q": [0, 1, 2, 3], "k": [4, 5], "v": [6, 7]}),
        ("groups", {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]}),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_fused_qkv_rows(layout: QkvLayout, heads: dict[str, list[int]], split: bool) -> None:
    tensors = fused_qkv("w", layout, is_half_split=split, bias="b")
    for part, expected in heads.items():
        within = [0, 2, 1, 3] if split and part != "v" else [0, 1, 2, 3]
        for place in (tensors[f"layers.{{}}.{part}"], tensors[f"layers.{{}}.{part}_bias"]):
            assert place.rows and place.rows(SPEC, (0,)).tolist() == [
                4 * head + row for head in expected for row in within
            ]


class TestFields:
    FIELDS = JsonFields(
        {
            "i": 3,
            "f": 0.5,
            "b": True,
            "s": "text",
            "n": None,
            "o": {"i": "x"},
            "l": [1] * 1000,
            "h": 10**30,
        },
        "a.json",
    )

    def test_typed_getters(self) -> None:
        fields = self.FIELDS
        assert (
            fields.integer("i"),
            fields.number("i"),
            fields.number("f"),
            fields.flag("b"),
            fields.string("s"),
        ) == (
            3,
            3.0,
            0.5,
            True,
            "text",
        )
        assert (
            fields.integer("n", 7),
            fields.flag("none", False),
            fields.optional_number("n"),
        ) == (7, False, None)
        assert "n" in fields and "none" not in fields
        assert not fields.section("none")

    @pytest.mark.parametrize(
        ("getter", "key", "message"),
        [
            ("integer", "n", "a.json: n is missing"),
            ("integer", "none", "a.json: none is missing"),
            ("integer", "b", "b must be an integer, found True"),
            ("integer", "f", r"f must be an integer, found 0\.5"),
            ("integer", "h", "h is out of range"),
            ("number", "h", "h is out of range"),
            ("number", "s", "s must be a number, found text"),
            ("flag", "i", "i must be true or false"),
            ("string", "l", "l must be a string, found "),
            ("section", "i", "i must be an object"),
        ],
    )
    def test_wrong_types_are_refused(self, getter: str, key: str, message: str) -> None:
        with pytest.raises(FormatError, match=message):
            getattr(self.FIELDS, getter)(key)

    def test_section_errors_name_the_section(self) -> None:
        with pytest.raises(FormatError, match=r"a\.json: o: i must be an integer, found x"):
            self.FIELDS.section("o").integer("i")

    def test_require_neutral(self) -> None:
        self.FIELDS.require_neutral({"i": (3,), "n": (), "none": ()})
        with pytest.raises(UnsupportedModelError, match=r"a\.json: f = 0\.5 is not supported"):
            self.FIELDS.require_neutral({"f": (1,)})

    def test_messages_shorten_values(self) -> None:
        assert (
            max(len(shown(value)) for value in ("x" * 1000, ["y" * 1000] * 1000, np.zeros(10**6)))
            <= 80
        )
