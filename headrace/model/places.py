"""Where files that fuse, stack or reorder matrices have the rows of ours: values of `Stored.rows`.

A rotary pair is two neighbouring rows of a head here, (2i, 2i + 1). Most files have it half-split,
(i, i + rotated / 2).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Literal

import numpy as np

from headrace.model.family import Numbers, Rows, Stored
from headrace.model.spec import ModelSpec

QkvLayout = Literal["separate", "blocks", "groups"]
"""How a file has queries, keys and values: apart; one behind the other; or those of each KV head
together, its queries first.
"""

_KINDS = ("nope", "pe")
"""The numbers of a query that are not rotated, and those that are."""
_ROTATED = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")


def weights(
    outside: Mapping[str, str], layers: str, inside: Mapping[str, str]
) -> dict[str, Stored]:
    """Weights, and their biases, that are stored as we need them: those outside of layers, and
    those inside, behind the prefix `layers`.

    Names are without `.weight` and `.bias`.
    """
    names = {
        **outside,
        **{f"layers.{{}}.{ours}": f"{layers}.{theirs}" for ours, theirs in inside.items()},
    }
    biases = {f"{ours}_bias": Stored(f"{theirs}.bias") for ours, theirs in names.items()}
    return {ours: Stored(f"{theirs}.weight") for ours, theirs in names.items()} | biases


def half_split(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The same tensors, in a file that has the rotary pairs of queries and keys half-split."""
    return {ours: _split(ours.rpartition(".")[2], stored) for ours, stored in tensors.items()}


def _split(part: str, stored: Stored) -> Stored:
    return (
        replace(stored, rows=partial(_head_rows, part, "separate", True))
        if part in _ROTATED
        else stored
    )


def fused_qkv(
    name: str, layout: QkvLayout, *, split: bool = True, bias: str = "", transposed: bool = False
) -> dict[str, Stored]:
    """Queries, keys and values out of one matrix `name`, and their biases out of `bias`, where
    there are any.

    `split`: rotary pairs are half-split.
    """
    tensors = {
        f"layers.{{}}.{p}": Stored(
            name, partial(_head_rows, p, layout, split), transposed=transposed
        )
        for p in "qkv"
    }
    biases = {
        f"layers.{{}}.{p}_bias": Stored(bias, partial(_head_rows, p, layout, split))
        for p in "qkv"
        if bias
    }
    return tensors | biases


def fused_gate_up(name: str) -> dict[str, Stored]:
    """Gate and up out of one matrix, the gate first."""
    return {f"layers.{{}}.{part}": Stored(name, partial(_half, part)) for part in ("gate", "up")}


def stacked(part: str, name: str) -> dict[str, Stored]:
    """A matrix, or a bias, of all experts out of one tensor, expert after expert."""
    return {
        f"layers.{{}}.experts.{{}}.{part}": Stored(
            name, partial(_expert_rows, part.removesuffix("_bias"))
        )
    }


def latent_rows(q: str, q_b: str, kv_a: str) -> dict[str, Stored]:
    """What attention by latent rows makes of a row, out of matrices of these names: queries out of
    `q`, or out of `q_b` where they have latent rows too, and the latent row with the rotated
    numbers of keys behind it out of `kv_a`.
    """
    queries = {
        f"{part}_{kind}": Stored(f"{name}.weight", partial(_query_rows, kind))
        for part, name in (("q", q), ("q_b", q_b))
        for kind in _KINDS
    }
    keys = {
        f"{part}{suffix}": Stored(f"{kv_a}.{theirs}", partial(_latent_rows, part))
        for part in ("kv_a", "k_pe")
        for suffix, theirs in (("", "weight"), ("_bias", "bias"))
    }
    return {f"layers.{{}}.{ours}": place for ours, place in (queries | keys).items()}


def latent_heads(kv_b: str, v_b: str = "") -> dict[str, Stored]:
    """What attention by latent rows makes of a latent row, head by head: out of one matrix with the
    keys of each head, then its values.

    With `v_b` values are in a matrix of their own, and keys are transposed.
    """
    keys, values = (
        Stored(name, partial(_head_share, part, bool(v_b)))
        for name, part in ((kv_b, "k"), (v_b or kv_b, "v"))
    )
    across = replace(keys, rows=None, slab=keys.rows, transposed=True)
    places = {"k": across if v_b else keys, "k_absorbed": keys if v_b else across, "v": values}
    return {f"layers.{{}}.heads.{{}}.{part}": place for part, place in places.items()}


@lru_cache(maxsize=64)  # a model's layers share the array
def _rows_of_heads(
    part: str, layout: QkvLayout, num_heads: int, num_kv_heads: int, head_dim: int, rotated: int
) -> Rows:
    heads = np.arange(num_heads if part == "q" else num_kv_heads)
    share = num_heads // num_kv_heads
    match layout:
        case "separate":
            first = heads
        case "blocks":
            first = heads + {"q": 0, "k": num_heads, "v": num_heads + num_kv_heads}[part]
        case "groups":
            first = (
                heads // share * (share + 2) + heads % share
                if part == "q"
                else heads * (share + 2) + share + (part == "v")
            )
    within = np.arange(head_dim)
    within[:rotated] = within[:rotated].reshape(2, -1).T.reshape(-1)
    rows: Rows = (first[:, None] * head_dim + within).reshape(-1)
    rows.setflags(write=False)
    return rows


def _head_rows(
    part: str, layout: QkvLayout, split: bool, spec: ModelSpec, numbers: Numbers
) -> Rows:
    kind, _, of = part.partition("_")
    num_heads, num_kv_heads = (
        (1, 1) if of == "norm" and spec.qk_norm == "head" else (spec.num_heads, spec.num_kv_heads)
    )
    rotated = spec.rotary_dim if split and kind != "v" else 0
    return _rows_of_heads(kind, layout, num_heads, num_kv_heads, spec.head_dim, rotated)


def _half(part: str, spec: ModelSpec, numbers: Numbers) -> Rows:
    return np.arange(spec.ffn_dim) + (spec.ffn_dim if part == "up" else 0)


def _expert_rows(part: str, spec: ModelSpec, numbers: Numbers) -> Rows:
    assert spec.experts
    rows = spec.dim if part == "down" else spec.experts.ffn_dim
    return np.arange(rows) + numbers[1] * rows


def _pairs(rotated: int, is_half_split: bool) -> Rows:
    """The rows of a rotated part, pair by pair."""
    rows = np.arange(rotated)
    return rows.reshape(2, -1).T.reshape(-1) if is_half_split else rows


def _query_rows(kind: str, spec: ModelSpec, numbers: Numbers) -> Rows:
    assert spec.mla
    nope = spec.head_dim - spec.rotary_dim
    within = (
        np.arange(nope)
        if kind == "nope"
        else nope + _pairs(spec.rotary_dim, spec.mla.is_half_split)
    )
    return (np.arange(spec.num_heads)[:, None] * spec.head_dim + within).reshape(-1)


def _latent_rows(part: str, spec: ModelSpec, numbers: Numbers) -> Rows:
    assert spec.mla
    rank = spec.mla.kv_rank
    return (
        np.arange(rank)
        if part == "kv_a"
        else rank + _pairs(spec.rotary_dim, spec.mla.is_half_split)
    )


def _head_share(part: str, is_apart: bool, spec: ModelSpec, numbers: Numbers) -> Rows:
    assert spec.mla
    keys, values = spec.head_dim - spec.rotary_dim, spec.mla.value_dim
    if is_apart:
        size = spec.mla.kv_rank if part == "k" else values
        return np.arange(size) + numbers[1] * size
    first = numbers[1] * (keys + values)
    return first + (np.arange(keys) if part == "k" else keys + np.arange(values))
