"""Sources of tensors in files that fuse, stack or reorder matrices.

Our rotary pairs are neighbouring rows of a head, (2i, 2i + 1). Half-split files store rows i and
i + rotated / 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Literal

import numpy as np

from headrace.model.family import Indices, Rows, TensorSource
from headrace.model.spec import ModelSpec

QkvLayout = Literal["separate", "blocks", "groups"]
"""One matrix has `blocks` of all queries, keys and values, or `groups` of a KV head's queries,
key and value.
"""

_HALF_SPLIT_PARTS = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")


def weights(
    outside: Mapping[str, str], layer_prefix: str, inside: Mapping[str, str]
) -> dict[str, TensorSource]:
    """Weights and biases in our form.

    The mappings have our names and the file's, without `.weight` and `.bias`.
    """
    names = dict(outside)
    names |= {f"layers.{{}}.{ours}": f"{layer_prefix}.{file}" for ours, file in inside.items()}
    biases = {f"{ours}_bias": TensorSource(f"{file}.bias") for ours, file in names.items()}
    return {ours: TensorSource(f"{file}.weight") for ours, file in names.items()} | biases


def half_split(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors of a file with half-split rotary pairs of queries and keys."""

    def source_of(name: str, source: TensorSource) -> TensorSource:
        part = name.rpartition(".")[2]
        if part not in _HALF_SPLIT_PARTS:
            return source
        return replace(source, rows=partial(_head_rows, part, "separate", True))

    return {name: source_of(name, source) for name, source in tensors.items()}


def fused_qkv(
    name: str,
    layout: QkvLayout,
    *,
    is_half_split: bool = True,
    bias: str = "",
    transposed: bool = False,
) -> dict[str, TensorSource]:
    """Queries, keys and values from the matrix `name`, and their biases."""
    tensors = {}
    for part in "qkv":
        rows = partial(_head_rows, part, layout, is_half_split)
        tensors[f"layers.{{}}.{part}"] = TensorSource(name, rows, transposed=transposed)
        if bias:
            tensors[f"layers.{{}}.{part}_bias"] = TensorSource(bias, rows)
    return tensors


def fused_gate_up(name: str) -> dict[str, TensorSource]:
    """Gate and up from one matrix, the gate first."""
    return {
        f"layers.{{}}.{part}": TensorSource(name, partial(_half_rows, part))
        for part in ("gate", "up")
    }


def stacked(part: str, name: str) -> dict[str, TensorSource]:
    rows = partial(_expert_rows, part.removesuffix("_bias"))
    return {f"layers.{{}}.experts.{{}}.{part}": TensorSource(name, rows)}


def mla_rows(q: str, q_b: str, kv_a: str) -> dict[str, TensorSource]:
    """Latent attention: matrices for rows. `kv_a` has the latent row, then the rotated part of
    keys.
    """
    tensors = {}
    for part, name in (("q", q), ("q_b", q_b)):
        for kind in ("nope", "pe"):
            rows = partial(_query_rows, kind)
            tensors[f"layers.{{}}.{part}_{kind}"] = TensorSource(f"{name}.weight", rows)
    for part in ("kv_a", "k_pe"):
        rows = partial(_latent_rows, part)
        tensors[f"layers.{{}}.{part}"] = TensorSource(f"{kv_a}.weight", rows)
        tensors[f"layers.{{}}.{part}_bias"] = TensorSource(f"{kv_a}.bias", rows)
    return tensors


def mla_heads(kv_b: str, v_b: str = "") -> dict[str, TensorSource]:
    """Latent attention: matrices of each head for a latent row.

    `kv_b` holds keys and values. If there is a `v_b`, `kv_b` holds the key matrices, transposed.
    """
    has_own_values = bool(v_b)
    keys = TensorSource(kv_b, partial(_head_matrix_rows, "k", has_own_values))
    values = TensorSource(v_b or kv_b, partial(_head_matrix_rows, "v", has_own_values))
    transposed_keys = replace(keys, rows=None, slab=keys.rows, transposed=True)
    return {
        "layers.{}.heads.{}.k": transposed_keys if has_own_values else keys,
        "layers.{}.heads.{}.k_absorbed": keys if has_own_values else transposed_keys,
        "layers.{}.heads.{}.v": values,
    }


@lru_cache(maxsize=64)  # all layers of a model share the array
def _rows_of_heads(
    part: str, layout: QkvLayout, num_heads: int, num_kv_heads: int, head_dim: int, rotated: int
) -> Rows:
    heads = np.arange(num_heads if part == "q" else num_kv_heads)
    group_size = num_heads // num_kv_heads
    match layout:
        case "separate":
            stored_heads = heads
        case "blocks":
            stored_heads = heads + {"q": 0, "k": num_heads, "v": num_heads + num_kv_heads}[part]
        case "groups":
            # A group has its queries, a key and a value.
            if part == "q":
                stored_heads = heads // group_size * (group_size + 2) + heads % group_size
            else:
                stored_heads = heads * (group_size + 2) + group_size + (part == "v")

    within_head = np.arange(head_dim)
    within_head[:rotated] = _pairs(rotated, is_half_split=True)
    rows: Rows = (stored_heads[:, None] * head_dim + within_head).reshape(-1)
    rows.setflags(write=False)
    return rows


def _head_rows(
    part: str, layout: QkvLayout, is_half_split: bool, spec: ModelSpec, indices: Indices
) -> Rows:
    kind, _, suffix = part.partition("_")
    has_one_head = suffix == "norm" and spec.qk_norm == "head"
    return _rows_of_heads(
        kind,
        layout,
        num_heads=1 if has_one_head else spec.num_heads,
        num_kv_heads=1 if has_one_head else spec.num_kv_heads,
        head_dim=spec.head_dim,
        rotated=spec.rotary_dim if is_half_split and kind != "v" else 0,
    )


def _half_rows(part: str, spec: ModelSpec, indices: Indices) -> Rows:
    return np.arange(spec.ffn_dim) + (spec.ffn_dim if part == "up" else 0)


def _expert_rows(part: str, spec: ModelSpec, indices: Indices) -> Rows:
    assert spec.experts
    _, expert = indices
    num_rows = spec.dim if part == "down" else spec.experts.ffn_dim
    return np.arange(num_rows) + expert * num_rows


def _pairs(rotated: int, is_half_split: bool) -> Rows:
    rows = np.arange(rotated)
    return rows.reshape(2, -1).T.reshape(-1) if is_half_split else rows


def _query_rows(kind: str, spec: ModelSpec, indices: Indices) -> Rows:
    assert spec.mla
    nope = spec.head_dim - spec.rotary_dim
    within_head = np.arange(nope)
    if kind == "pe":
        within_head = nope + _pairs(spec.rotary_dim, spec.mla.is_half_split)
    return (np.arange(spec.num_heads)[:, None] * spec.head_dim + within_head).reshape(-1)


def _latent_rows(part: str, spec: ModelSpec, indices: Indices) -> Rows:
    assert spec.mla
    rank = spec.mla.kv_rank
    if part == "kv_a":
        return np.arange(rank)
    return rank + _pairs(spec.rotary_dim, spec.mla.is_half_split)


def _head_matrix_rows(part: str, has_own_values: bool, spec: ModelSpec, indices: Indices) -> Rows:
    assert spec.mla
    _, head = indices
    key_rows, value_rows = spec.head_dim - spec.rotary_dim, spec.mla.value_dim
    if has_own_values:
        num_rows = spec.mla.kv_rank if part == "k" else value_rows
        return np.arange(num_rows) + head * num_rows
    first = head * (key_rows + value_rows)
    return first + (np.arange(key_rows) if part == "k" else key_rows + np.arange(value_rows))
