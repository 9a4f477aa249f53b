"""Random EAGLE-3 drafters, the folders of their layouts, and their equations in NumPy."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from headrace.checkpoint.drafter import Drafter
from headrace.model.spec import DrafterSpec, ModelSpec, RopeSpec
from tests.tiny import Tensors, random_tensors

Floats = NDArray[np.float64]


def random_drafter(
    model: tuple[ModelSpec, Tensors],
    seed: int = 0,
    *,
    vocab: int = 0,
    taps: Sequence[int] = (0, 1, 1),
    **fields: Any,
) -> Drafter:
    """A drafter of `vocab` random tokens (0: all, without a map), whose layer looks like the
    model's.
    """
    target, tensors = model
    rng = np.random.default_rng(seed)
    tokens = None
    if vocab:
        tokens = np.sort(rng.choice(target.vocab_size, vocab, replace=False)).astype(np.int32)
    drafter = DrafterSpec(
        taps=tuple(taps),
        target_dim=target.dim,
        vocab_size=vocab or target.vocab_size,
        **fields,
    )
    spec = ModelSpec(
        architecture="eagle3",
        num_layers=1,
        dim=target.dim,
        num_heads=4,
        num_kv_heads=2,
        head_dim=target.dim // 4,
        ffn_dim=48,
        vocab_size=target.vocab_size,
        max_context=target.max_context,
        norm_eps=1e-5,
        rope=RopeSpec(target.dim // 4),
        drafter=drafter,
    )
    own = random_tensors(spec, seed)
    return Drafter(spec, own | {"embed": tensors["embed"]}, tokens)


def config_of(drafter: Drafter, layout: str, **changes: Any) -> dict[str, Any]:
    """The `config.json` of a drafter in the layout of its `authors` or of `speculators`."""
    spec, own = drafter.spec, drafter.spec.drafter
    assert own
    layer = {
        "model_type": "llama",
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
    }
    if layout == "authors":
        config = layer | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": own.vocab_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(own.taps)},
        }
    else:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": own.vocab_size,
            "norm_before_residual": own.norm_before_residual,
            "eagle_aux_hidden_state_layer_ids": list(own.taps),
            "transformer_layer_config": layer,
        }
    return config | changes


def half_split_rows(spec: ModelSpec, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """The rows of queries or keys as files have them: first halves of rotary pairs first."""
    heads = matrix.reshape(-1, spec.head_dim // 2, 2, matrix.shape[1])
    return heads.swapaxes(1, 2).reshape(matrix.shape)


def stored_tensors(drafter: Drafter, layout: str) -> dict[str, torch.Tensor]:
    """The tensors of a drafter by the names of a layout. The authors' has no embedding."""
    spec = drafter.spec
    layer = "midlayer" if layout == "authors" else "layers.0"
    names = {
        "fuse": "fc",
        "norm": "norm",
        "head": "lm_head",
        "layers.0.attn_norm": f"{layer}.input_layernorm",
        "layers.0.hidden_norm": f"{layer}.hidden_norm",
        "layers.0.mlp_norm": f"{layer}.post_attention_layernorm",
    }
    names |= {f"layers.0.{part}": f"{layer}.self_attn.{part}_proj" for part in "qkvo"}
    names |= {f"layers.0.{part}": f"{layer}.mlp.{part}_proj" for part in ("gate", "up", "down")}
    if layout == "speculators":
        names["embed"] = "embed_tokens"
    stored = {}
    for ours, name in names.items():
        values = drafter.tensors[ours].dequantise()
        if ours in ("layers.0.q", "layers.0.k"):
            values = half_split_rows(spec, values)
        stored[f"{name}.weight"] = torch.from_numpy(values.copy())
    if drafter.tokens is not None:
        shifts = drafter.tokens - np.arange(len(drafter.tokens))
        stored["d2t"] = torch.from_numpy(shifts.astype(np.int64))
        has_token = np.isin(np.arange(spec.vocab_size), drafter.tokens)
        stored["t2d"] = torch.from_numpy(has_token)
    return stored


def write_drafter(
    folder: Path,
    drafter: Drafter,
    layout: str,
    tensors: dict[str, torch.Tensor | None] | None = None,
    **config: Any,
) -> Path:
    """Write a folder in a layout, with changed fields and tensors (None: without it)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(drafter, layout, **config)))
    stored = stored_tensors(drafter, layout) | (tensors or {})
    save_file(
        {name: tensor for name, tensor in stored.items() if tensor is not None},
        folder / "model.safetensors",
    )
    return folder


def random_eagle1(
    model: tuple[ModelSpec, Tensors], seed: int = 0, *, fuse_bias: bool = False
) -> Drafter:
    """An EAGLE-1 drafter with the model's own embedding, last norm and head."""
    target, tensors = model
    spec = random_drafter(model, seed).spec
    drafter = DrafterSpec(
        taps=(target.num_layers,),
        target_dim=target.dim,
        vocab_size=target.vocab_size,
        fuse_bias=fuse_bias,
    )
    spec = replace(spec, architecture="eagle1", drafter=drafter)
    head = tensors["embed" if target.tied_embeddings else "head"]
    shared = {"embed": tensors["embed"], "target_norm": tensors["norm"], "head": head}
    return Drafter(spec, random_tensors(spec, seed) | shared, tokens=None)


def random_mtp(model: tuple[ModelSpec, Tensors], seed: int = 0) -> Drafter:
    """A layer for drafts of the model's own shape, with its embedding, last norm and head."""
    target, tensors = model
    drafter = DrafterSpec(
        taps=(target.num_layers,), target_dim=target.dim, vocab_size=target.vocab_size
    )
    spec = replace(
        target,
        architecture="mtp",
        num_layers=1,
        windows=(),
        rotated=(),
        experts=replace(target.experts, dense_layers=()) if target.experts else None,
        tied_embeddings=False,
        drafter=drafter,
    )
    head = tensors["embed" if target.tied_embeddings else "head"]
    shared = {"embed": tensors["embed"], "target_norm": tensors["norm"], "head": head}
    return Drafter(spec, random_tensors(spec, seed) | shared, tokens=None)


DRAFTERS: Mapping[str, Callable[[tuple[ModelSpec, Tensors]], Drafter]] = {
    "EAGLE-3": partial(random_drafter, vocab=30),
    "EAGLE-1": random_eagle1,
    "MTP": random_mtp,
}
"""Random drafters of a model, by kind."""


def write_eagle1(
    folder: Path,
    drafter: Drafter,
    layout: str,
    tensors: dict[str, torch.Tensor | None] | None = None,
    **changes: Any,
) -> Path:
    """Write a folder in the layout of its `authors`, of `vllm` or of `speculators`."""
    spec = drafter.spec
    layer = config_of(drafter, "speculators")["transformer_layer_config"]
    config: dict[str, Any] = {
        "authors": layer | {"architectures": ["LlamaForCausalLM"], "bias": spec.drafter.fuse_bias},
        "vllm": {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": layer},
        "speculators": {
            "architectures": ["EagleSpeculator"],
            "speculators_model_type": "eagle",
            "transformer_layer_config": layer,
            "layernorms": False,
            "fusion_bias": spec.drafter.fuse_bias,
        },
    }[layout]
    fuse, home = {
        "authors": ("fc", "layers.0"),
        "vllm": ("model.fc", "model.layers.0"),
        "speculators": ("fusion_fc", "transformer"),
    }[layout]
    names = {"fuse": f"{fuse}.weight", "fuse_bias": f"{fuse}.bias"}
    names["layers.0.mlp_norm"] = f"{home}.post_attention_layernorm.weight"
    names |= {f"layers.0.{part}": f"{home}.self_attn.{part}_proj.weight" for part in "qkvo"}
    names |= {
        f"layers.0.{part}": f"{home}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    stored: dict[str, torch.Tensor | None] = {}
    for ours, name in names.items():
        if ours in drafter.tensors:
            values = drafter.tensors[ours].dequantise()
            if ours in ("layers.0.q", "layers.0.k"):
                values = half_split_rows(spec, values)
            stored[name] = torch.from_numpy(values.reshape(-1) if "bias" in ours else values.copy())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    stored |= tensors or {}
    save_file(
        {name: tensor for name, tensor in stored.items() if tensor is not None},
        folder / "model.safetensors",
    )
    return folder


class Twin:
    """EAGLE-3 for one sequence, written from the paper and its authors' code, in float64."""

    def __init__(self, drafter: Drafter) -> None:
        self.spec = drafter.spec
        self.tokens = drafter.tokens
        self.w: dict[str, Floats] = {
            name: tensor.dequantise().astype(np.float64) for name, tensor in drafter.tensors.items()
        }

    def draft(self, known: Sequence[int], taps: Floats, depth: int) -> list[int]:
        """The likeliest tokens after `known`, from the rows [len(known) - 1, width]."""
        assert self.spec.drafter
        keys: list[Floats] = []
        values: list[Floats] = []
        row = np.zeros(0)
        for position, tap in enumerate(taps):
            row = self._row(known[position + 1], self._joined(tap), position, keys, values)
        drafted: list[int] = []
        for step in range(depth):
            best = int(np.argmax(self.w["head"] @ self._before_head(row)))
            drafted.append(best if self.tokens is None else int(self.tokens[best]))
            row = self._row(drafted[-1], row, len(taps) + step, keys, values)
        return drafted

    def _row(
        self, token: int, hidden: Floats, position: int, keys: list[Floats], values: list[Floats]
    ) -> Floats:
        assert self.spec.drafter
        spec, w = self.spec, self.w
        normed = self._norm(hidden, "layers.0.hidden_norm")
        merged = np.concatenate([self._norm(w["embed"][token], "layers.0.attn_norm"), normed])
        residual = normed if spec.drafter.norm_before_residual else hidden
        return self._layer(merged, residual, position, keys, values)

    def _joined(self, tap: Floats) -> Floats:
        result: Floats = self.w["fuse"] @ tap
        return result

    def _before_head(self, row: Floats) -> Floats:
        return self._norm(row, "norm")

    def _layer(
        self,
        merged: Floats,
        residual: Floats,
        position: int,
        keys: list[Floats],
        values: list[Floats],
    ) -> Floats:
        """The row after attention from `merged`, which is added to `residual`, and the MLP."""
        spec, w = self.spec, self.w
        q = self._turned(w["layers.0.q"] @ merged, position)
        keys.append(self._turned(w["layers.0.k"] @ merged, position))
        values.append((w["layers.0.v"] @ merged).reshape(spec.num_kv_heads, -1))

        attended = []
        for head in range(spec.num_heads):
            shared = head // (spec.num_heads // spec.num_kv_heads)
            scores = np.array([q[head] @ key[shared] for key in keys]) / spec.head_dim**0.5
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            attended.append(sum(x * v[shared] for x, v in zip(weights, values, strict=True)))
        x = residual + w["layers.0.o"] @ np.concatenate(attended)
        y = self._norm(x, "layers.0.mlp_norm")
        gate = w["layers.0.gate"] @ y
        result: Floats = x + w["layers.0.down"] @ (
            gate / (1 + np.exp(-gate)) * (w["layers.0.up"] @ y)
        )
        return result

    def _norm(self, x: Floats, name: str) -> Floats:
        result: Floats = x / np.sqrt(np.mean(x**2) + self.spec.norm_eps) * self.w[name].reshape(-1)
        return result

    def _turned(self, x: Floats, position: int) -> Floats:
        pairs = x.reshape(-1, self.spec.head_dim // 2, 2)
        angles = position * 10000.0 ** (-2 * np.arange(pairs.shape[1]) / self.spec.head_dim)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], -1).reshape(len(pairs), -1)


class Eagle1Twin(Twin):
    """EAGLE-1 for one sequence (`eagle/model/cnets1.py`)."""

    def _joined(self, tap: Floats) -> Floats:
        return self._norm(tap, "target_norm")

    def _before_head(self, row: Floats) -> Floats:
        return row

    def _row(
        self, token: int, hidden: Floats, position: int, keys: list[Floats], values: list[Floats]
    ) -> Floats:
        x: Floats = self.w["fuse"] @ np.concatenate([self.w["embed"][token], hidden])
        if "fuse_bias" in self.w:
            x = x + self.w["fuse_bias"].reshape(-1)
        return self._layer(x, x, position, keys, values)
