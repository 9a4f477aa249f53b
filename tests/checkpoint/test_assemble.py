"""Tensors of files become the model's tensors, for the layouts of all families."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.checkpoint.assemble import assemble, stored_shapes
from headrace.errors import FormatError, UnsupportedModelError
from headrace.model import tensor_shapes
from headrace.model.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from headrace.model.family import ConfigLayout, Family, Indices, Layout, TensorSource
from headrace.model.from_config import TENSORS
from headrace.model.llama import LLAMA
from headrace.model.spec import MlaSpec, ModelSpec, RopeSpec
from headrace.program.op import Value
from headrace.program.trace import Tracer
from headrace.quant.formats import RAW_FORMATS, StoredTensor
from tests.backend.stored import random_stored
from tests.families import spec_of

SPEC = ModelSpec(
    architecture="test",
    num_layers=2,
    dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=32,
    vocab_size=9,
    max_context=16,
    norm_eps=1e-5,
    rope=RopeSpec(8),
    qkv_bias=True,
)
Arrays = dict[str, NDArray[Any]]


def family_of(tensors: dict[str, TensorSource], equations: Any = LLAMA.forward) -> Family:
    layout = ConfigLayout(
        architectures=("Test",),
        spec=lambda config: SPEC,
        tensors=TENSORS | tensors,
        ignored=(".mask",),
    )
    return Family("test", equations, config=layout)


def pairs(heads: int) -> NDArray[np.int64]:
    """Rows of heads with half-split rotary pairs, in our order."""
    return np.arange(heads * SPEC.head_dim).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def queries(spec: ModelSpec, numbers: Indices) -> NDArray[np.int64]:
    return pairs(spec.num_heads)


def keys(spec: ModelSpec, numbers: Indices) -> NDArray[np.int64]:
    return spec.num_heads * spec.head_dim + pairs(spec.num_kv_heads)


def values(spec: ModelSpec, numbers: Indices) -> NDArray[np.int64]:
    return (spec.num_heads + spec.num_kv_heads) * spec.head_dim + np.arange(
        spec.num_kv_heads * spec.head_dim
    )


FUSED = {
    f"layers.{{}}.{part}{bias}": TensorSource(f"h.{{}}.qkv.{kind}", rows)
    for part, rows in (("q", queries), ("k", keys), ("v", values))
    for bias, kind in (("", "weight"), ("_bias", "bias"))
}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> tuple[Family, dict[str, StoredTensor]]:
    """A family with queries, keys and values in one matrix (Q8_0) and one vector."""
    family = family_of(FUSED)
    monkeypatch.setattr("headrace.model.FAMILIES", {"test": family})
    stored = {}
    for name, shape in tensor_shapes(SPEC).items():
        place = family.config.source_of(name)[0].name
        if ".qkv." in place:
            shape = (64, *shape[1:])
        rng = np.random.default_rng(len(stored))
        stored[place] = (
            StoredTensor.from_floats(place, rng.normal(size=shape).astype(np.float32))
            if len(shape) == 1
            else random_stored("Q8_0", *shape, seed=len(stored), name=place)
        )
    return family, stored


def test_a_fused_matrix_is_split_without_reading_it(
    fused: tuple[Family, dict[str, StoredTensor]],
) -> None:
    family, stored = fused
    tensors = assemble(SPEC, family.config, stored, "x")
    assert {name: tensor.shape for name, tensor in tensors.items()} == tensor_shapes(SPEC)
    for layer in range(2):
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            whole = stored[f"h.{layer}.qkv.{kind}"].dequantise()
            for part, rows in (("q", queries), ("k", keys), ("v", values)):
                tensor = tensors[f"layers.{layer}.{part}{suffix}"]
                np.testing.assert_array_equal(tensor.dequantise(), whole[rows(SPEC, ())])
                if not suffix:
                    assert np.shares_memory(
                        tensor.parts["codes"], stored[f"h.{layer}.qkv.{kind}"].parts["codes"]
                    )
                    assert tensor.nbytes == tensor.rows * 34
    assert tensors["layers.0.v"].row_order is None


def test_what_several_share_has_the_rows_of_all(
    fused: tuple[Family, dict[str, StoredTensor]],
) -> None:
    family, stored = fused
    short = random_stored("Q8_0", 63, 32, 0)
    with pytest.raises(
        FormatError, match=r"h\.1\.qkv\.weight has shape \[63, 32\], expected \[64, 32\]"
    ):
        assemble(SPEC, family.config, stored | {"h.1.qkv.weight": short}, "x")
    del stored["h.0.qkv.bias"]
    with pytest.raises(FormatError, match=r"h\.0\.qkv\.bias is missing; expected shape \[64\]"):
        assemble(SPEC, family.config, stored, "x")


def test_what_is_left_over(fused: tuple[Family, dict[str, StoredTensor]]) -> None:
    family, stored = fused
    extra = StoredTensor.from_floats("e", np.zeros(3, np.float32))
    assemble(SPEC, family.config, stored | {"h.0.attn.mask": extra}, "x")
    with pytest.raises(UnsupportedModelError, match="extra is not a tensor of a test model"):
        assemble(SPEC, family.config, stored | {"extra": extra}, "x")
    tied = replace(SPEC, tied_embeddings=True)
    del stored["lm_head.weight"]
    assert "head" not in assemble(tied, family.config, stored, "x")


def test_plain_numbers_are_no_weights(fused: tuple[Family, dict[str, StoredTensor]]) -> None:
    family, stored = fused
    place = "model.layers.0.mlp.up_proj.weight"
    numbers = StoredTensor.from_bytes(place, RAW_FORMATS["I8"], (32, 32), np.zeros(1024, np.uint8))
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight has type I8"):
        assemble(SPEC, family.config, stored | {place: numbers}, "x")


@pytest.mark.parametrize("stacked", [False, True])
def test_experts(monkeypatch: pytest.MonkeyPatch, stacked: bool) -> None:
    """Files have a tensor per expert, or one of three dimensions; the model has a
    matrix per expert.
    """

    def equations(spec: ModelSpec, g: Tracer) -> Value:
        x = g.embed(g.weight("embed", spec.vocab_size, spec.dim))
        for layer in range(spec.num_layers):
            for expert in range(3):
                x = g.add(x, g.linear(x, g.weight(f"layers.{layer}.experts.{expert}.up", 32, 32)))
        return x

    def of_expert(spec: ModelSpec, numbers: Indices) -> NDArray[np.int64]:
        return numbers[1] * 32 + np.arange(32)

    up = TensorSource("h.{}.up", of_expert) if stacked else TensorSource("h.{}.experts.{}.up")
    family = family_of({"layers.{}.experts.{}.up": up}, equations)
    monkeypatch.setattr("headrace.model.FAMILIES", {"test": family})
    rng = np.random.default_rng(0)
    arrays: Arrays = {"model.embed_tokens.weight": rng.normal(size=(9, 32))}
    experts = rng.normal(size=(2, 3, 32, 32)).astype(np.float32)
    for layer in range(2):
        arrays |= (
            {f"h.{layer}.up": experts[layer]}
            if stacked
            else {f"h.{layer}.experts.{e}.up": experts[layer, e] for e in range(3)}
        )
    stored = {name: StoredTensor.from_floats(name, array) for name, array in arrays.items()}
    tensors = assemble(SPEC, family.config, stored, "x")
    for layer in range(2):
        for expert in range(3):
            tensor = tensors[f"layers.{layer}.experts.{expert}.up"]
            np.testing.assert_array_equal(tensor.dequantise(), experts[layer, expert])
            assert tensor.row_order is None and tensor.nbytes == 32 * 32 * 4


def zeros(spec: ModelSpec, layout: Layout) -> dict[str, StoredTensor]:
    """The tensors of a file of zeros."""
    return {
        name: StoredTensor.from_floats(name, np.zeros(shape, np.float32))
        for name, shape in stored_shapes(spec, layout).items()
    }


@pytest.mark.parametrize("format", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("is_apart", [False, True])
def test_matrices_of_heads(format: str, is_apart: bool) -> None:
    """Keys and values of a head from one matrix or two; both forms of attention get the
    same numbers.
    """
    config, gguf = DEEPSEEK_V2.config, DEEPSEEK_V2.gguf
    assert config and gguf
    spec = replace(spec_of("deepseek-v2-lite"), head_dim=40, mla=MlaSpec(64, 32))
    layout = gguf if is_apart else config
    heads, rng = np.zeros((3, 4, 64, 64), np.float32), np.random.default_rng(0)

    def stored(name: str, values: NDArray[np.float32]) -> StoredTensor:
        if format == "F32":
            return StoredTensor.from_floats(name, values)
        made = random_stored(
            format, math.prod(values.shape[:-1]), values.shape[-1], int(rng.integers(99)), name
        )
        return replace(made, shape=values.shape)

    tensors = zeros(spec, layout)
    for layer in range(spec.num_layers):
        if is_apart:
            parts = {
                f"blk.{layer}.attn_k_b.weight": (4, 64, 32),
                f"blk.{layer}.attn_v_b.weight": (4, 32, 64),
            }
        else:
            parts = {f"model.layers.{layer}.self_attn.kv_b_proj.weight": (256, 64)}
        made = [
            stored(name, rng.standard_normal(shape).astype(np.float32))
            for name, shape in parts.items()
        ]
        tensors |= {tensor.name: tensor for tensor in made}
        found = [tensor.dequantise() for tensor in made]
        heads[layer] = (
            np.concatenate([found[0].swapaxes(1, 2), found[1]], axis=1)
            if is_apart
            else found[0].reshape(4, 64, 64)
        )
    for is_absorbed in (False, True):
        latent = replace(spec.mla or MlaSpec(1, 1), is_absorbed=is_absorbed)
        ours = assemble(replace(spec, mla=latent), layout, tensors, "x")
        for layer, head in np.ndindex(3, 4):
            prefix, keys = f"layers.{layer}.heads.{head}", heads[layer, head, :32]
            key = (
                ours[f"{prefix}.k_absorbed"].dequantise()
                if is_absorbed
                else ours[f"{prefix}.k"].dequantise().T
            )
            np.testing.assert_array_equal(key, keys.T)
            np.testing.assert_array_equal(ours[f"{prefix}.v"].dequantise(), heads[layer, head, 32:])
    short = replace(tensors[made[0].name], shape=(made[0].rows - 1, made[0].cols))
    with pytest.raises(FormatError, match=r"has shape .*, expected \[256, (64|32)\]"):
        assemble(spec, layout, tensors | {made[0].name: short}, "x")


def test_extra_layers_of_a_file() -> None:
    """DeepSeek-V3's files end with a layer for drafts, which other families refuse."""
    config = DEEPSEEK_V3.config
    assert config
    for name, is_extra in (
        ("model.layers.3.eh_proj.weight", True),
        ("model.layers.2.eh_proj.weight", False),
        ("model.layers.x.y", False),
    ):
        assert config.is_extra_layer(name, spec_of("deepseek-v3")) == is_extra
        assert LLAMA.config and not LLAMA.config.is_extra_layer(name, spec_of("llama3-gqa"))
    spec = replace(
        SPEC, architecture="deepseek_v3", rope=RopeSpec(4), qkv_bias=False, mla=MlaSpec(8, 8)
    )
    stored = zeros(spec, config)
    extra = StoredTensor.from_floats("model.layers.2.eh_proj.weight", np.zeros((1, 1), np.float32))
    assert (
        assemble(spec, config, stored | {extra.name: extra}, "x").keys()
        == tensor_shapes(spec).keys()
    )
    with pytest.raises(UnsupportedModelError, match="is not a tensor"):
        assemble(spec, config, stored | {"model.layers.1.eh_proj.weight": extra}, "x")
