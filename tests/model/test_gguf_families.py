"""GGUF metadata and tensors of families, as the converter of llama.cpp writes them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.assemble import assemble, stored_shapes
from headrace.errors import UnsupportedModelError
from headrace.model import FAMILIES, tensor_shapes
from headrace.model.family import GgufLayout
from headrace.model.fields import JsonFields
from headrace.model.rope import inverse_frequencies
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from tests.families import spec_of

DEEPSEEK = {
    **{
        "block_count": 3,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
    },
    **{
        "attention.head_count_kv": 1,
        "attention.key_length": 48,
        "attention.value_length": 40,
        "attention.key_length_mla": 24,
    },
    **{
        "attention.value_length_mla": 12,
        "attention.q_lora_rank": 24,
        "attention.kv_lora_rank": 40,
        "rope.dimension_count": 8,
    },
    **{
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "leading_dense_block_count": 1,
        "vocab_size": 101,
    },
    **{
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 2,
        "expert_weights_scale": 4.0,
    },
    **{
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    },
    **{
        "rope.scaling.yarn_log_multiplier": 0.09,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_gating_func": 1,
    },
}
V3 = {"expert_gating_func": 2, "expert_weights_scale": 2.5, "expert_weights_norm": True}
LEGACY = {"attention.head_count_kv": 4, "attention.key_length": 24, "attention.value_length": 12}
"""Keys of older files, without the keys of the absorbed form."""
OSS = {
    **{
        "block_count": 3,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "expert_feed_forward_length": 64,
    },
    **{
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
    },
    **{
        "attention.sliding_window": 9,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
    },
    **{
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "expert_count": 4,
        "expert_used_count": 2,
    },
}
LEGACY_DEEPSEEK = {
    key: value for key, value in (DEEPSEEK | LEGACY).items() if not key.endswith("_mla")
}


def opened(
    variant: str, keys: Mapping[str, Any], is_legacy: bool = False
) -> tuple[ModelSpec, ModelSpec, GgufLayout, dict[str, StoredTensor]]:
    """The spec from a variant's `config.json`, the spec from its GGUF metadata, and its tensors as
    zeros.
    """
    config_spec = spec_of(variant)
    family = "deepseek_v2" if config_spec.mla else config_spec.architecture
    layout = FAMILIES[family].gguf
    assert layout
    named = (
        replace(layout, tensors={**layout.tensors, **layout.alternatives[0]})
        if is_legacy
        else layout
    )
    stored = {
        name: StoredTensor.from_floats(name, np.zeros(shape, np.float32))
        for name, shape in stored_shapes(replace(config_spec, architecture=family), named).items()
    }
    fields = JsonFields(
        {f"{layout.architectures[0]}.{key}": value for key, value in keys.items()}, "a.gguf"
    )
    return config_spec, layout.spec(fields, stored), layout, stored


@pytest.mark.parametrize(
    ("variant", "keys", "is_legacy"),
    [
        ("deepseek-v2", DEEPSEEK, False),
        ("deepseek-v2", LEGACY_DEEPSEEK, True),
        ("deepseek-v3", DEEPSEEK | V3, False),
        ("gpt-oss", OSS, False),
    ],
)
def test_gguf_metadata_gives_the_same_spec_as_config_json(
    variant: str, keys: Mapping[str, Any], is_legacy: bool
) -> None:
    """Except the factor of cosines and sines if YaRN weights it differently from scores: a GGUF
    file does not contain it.
    """
    want, got, layout, stored = opened(variant, keys, is_legacy)
    assert want.rope and got.rope and got.attention_scale == pytest.approx(want.attention_scale)
    ours, theirs = (inverse_frequencies(spec.rope, 256, 256) for spec in (got, want) if spec.rope)
    np.testing.assert_allclose(ours[0], theirs[0])
    assert ours[1] == pytest.approx(1.0 if want.mla else theirs[1])
    same = {
        "rope": want.rope,
        "architecture": want.architecture,
        "attention_scale": want.attention_scale,
    }
    assert replace(got, **same) == want
    assert assemble(got, layout, stored, "a.gguf").keys() == tensor_shapes(want).keys()


@pytest.mark.parametrize(
    "change",
    [{"expert_gating_func": 3}, {"attention.temperature_scale": 0.1}],
)
def test_unsupported_gguf_keys_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        opened("deepseek-v2", DEEPSEEK | change)
