"""Large key biases, which the KV does not store.

Qwen2 and Qwen2.5 (2024) have key biases of up to 350 in a few rotary pairs of a few layers. A
rounded key then loses digits of its small numbers. So the loader splits such a bias:
keys are stored with the small part, and attention adds the large part to scores, by position.
"""

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor

_MIN_LENGTH = 8.0
"""Min length of a large pair of biases. Keys without a bias have numbers of about this size."""
_MAX_PAIRS = 8
"""Of a head. Each takes as long as two numbers of a key, in float32."""


def split_key_biases(
    spec: ModelSpec, tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors, with a small and a large part of each key bias that has large pairs."""
    parts: dict[str, StoredTensor] = {}
    if spec.mla or spec.qk_norm != "none":  # a norm follows the bias
        return dict(tensors)
    for layer in range(spec.num_layers):
        name = f"layers.{layer}.k_bias"
        if name not in tensors:
            continue
        bias = tensors[name].dequantise().reshape(-1)
        large = _large_part(bias, spec.head_dim)
        if large.any():
            small = np.where(large == 0, bias, np.float32(0))
            for part, values in (("small", small), ("large", large)):
                parts[f"{name}_{part}"] = StoredTensor.from_floats(f"{name}_{part}", values)
    return {**tensors, **parts}


def has_large_key_biases(tensors: Collection[str]) -> bool:
    """Whether any key bias of these tensors, by name, was split."""
    return any(name.endswith(".k_bias_large") for name in tensors)


def _large_part(bias: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """The bias in the longest pairs (2i, 2i + 1) of each head, and zeros elsewhere."""
    if head_dim % 2 or not np.isfinite(bias).all():
        return np.zeros_like(bias)
    pairs = bias.reshape(-1, head_dim // 2, 2)
    lengths = np.linalg.norm(pairs, axis=2)
    rank = np.argsort(np.argsort(-lengths, axis=1, kind="stable"), axis=1)
    is_large = (lengths >= _MIN_LENGTH) & (rank < _MAX_PAIRS)
    large: NDArray[np.float32] = np.where(is_large[..., None], pairs, np.float32(0)).reshape(-1)
    return large
