"""Folders of EAGLE-3 drafters: the authors' layout, and the layout of `speculators`.

Both have the tensors of one decoder layer over rows of the target (`headrace/model/eagle3.py`).
The authors name the layer `midlayer` and describe it in config.json itself (SafeAILab/EAGLE);
`speculators` names it `layers.0` and describes it in `transformer_layer_config`
(vllm-project/speculators, `models/eagle3/config.py`). Token i of the drafter is token i + d2t[i] of
the target, and t2d says which tokens of the target it has. `headrace distil` writes the authors'
layout, with `embedding_in_residual` for its variant.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.assemble import assemble
from headrace.checkpoint.drafter import (
    Drafter,
    check_finite,
    check_target,
    layer_spec,
    with_lent,
)
from headrace.checkpoint.load import Checkpoint, checked_spec
from headrace.checkpoint.safetensors import read_folder
from headrace.errors import FormatError
from headrace.model.eagle3 import TENSORS
from headrace.model.family import Layout
from headrace.model.fields import JsonFields
from headrace.model.spec import DrafterSpec, ModelSpec
from headrace.quant.formats import StoredTensor

_LAYER = "transformer_layer_config"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_FAMILIES = ("llama", "qwen3")
"""Families of the drafter's layer that are published."""
_LAYOUT = Layout(
    architectures=("eagle3",),
    tensors=TENSORS,
    ignored=("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight"),
)


def open_eagle3(path: Path, config: JsonFields, target: Checkpoint) -> Drafter:
    """Open the EAGLE-3 drafter in a folder with this configuration.

    Raises as `open_checkpoint`, and RequestError if it belongs to another model.
    """
    spec = _spec(config, target.spec.num_layers)
    check_target(path.name, spec, target.spec)

    stored = {_own_name(name): tensor for name, tensor in read_folder(path).items()}
    maps: dict[str, StoredTensor] = {
        name: stored.pop(name) for name in ("d2t", "t2d") if name in stored
    }
    drafter = spec.drafter
    assert drafter
    tokens = _target_tokens(path.name, maps, drafter.vocab_size, spec.vocab_size)
    if "embed_tokens.weight" not in stored:
        if spec.dim != drafter.target_dim:
            raise FormatError(
                f"{path.name}: tensor embed_tokens.weight is missing, and the model's embedding "
                f"has {drafter.target_dim:,} columns in place of {spec.dim:,}"
            )
        stored["embed_tokens.weight"] = target.tensors["embed"]

    tensors = assemble(spec, _LAYOUT, stored, path.name)
    check_finite(path.name, {name: t for name, t in tensors.items() if name != "embed"})
    return Drafter(spec, with_lent(tensors, target), tokens)


def _spec(config: JsonFields, num_layers: int) -> ModelSpec:
    """The specification of a drafter for a model with this number of layers."""
    config.require_neutral({"norm_before_fc": (False,), "fc_norm": (False,), "use_mla": (False,)})
    layer = config.section(_LAYER) if _LAYER in config else config
    spec = layer_spec(layer, _FAMILIES)
    drafter = DrafterSpec(
        taps=_taps(config, num_layers),
        target_dim=config.integer("target_hidden_size", spec.dim),
        vocab_size=config.integer("draft_vocab_size", spec.vocab_size),
        norm_before_residual=config.flag("norm_before_residual", False),
        embedding_in_residual=config.flag("embedding_in_residual", False),
    )
    spec = replace(spec, architecture="eagle3", tied_embeddings=False, drafter=drafter)
    return checked_spec(spec, config.where)


def _taps(config: JsonFields, num_layers: int) -> tuple[int, ...]:
    """The layers that the file names, or else the authors' layers.

    The row before layer i is the result of layer i - 1 (`eagle/model/modeling_llama_kv.py`).
    """
    places = (config, config.section("eagle_config"))
    given = next((place for place in places if place.get(_TAPS) is not None), None)
    if given is None:
        return 2, num_layers // 2, num_layers - 3
    values = given.number_list(_TAPS)
    taps = tuple(int(value) for value in values)
    if not 1 <= len(taps) <= 8 or taps != values:
        raise given.unsupported(_TAPS)
    return taps


def _own_name(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _target_tokens(
    name: str, maps: Mapping[str, StoredTensor], num_drafted: int, vocab_size: int
) -> NDArray[np.int32] | None:
    """The target's token of each token of the drafter. Raises FormatError for a wrong map."""

    def refused(reason: str) -> FormatError:
        return FormatError(f"{name}: {reason}; choose a drafter that was trained for this model")

    if "d2t" not in maps:
        if num_drafted != vocab_size:
            raise refused(
                f"draft_vocab_size is {num_drafted:,} of {vocab_size:,} tokens, but tensor d2t, "
                "which maps them, is missing"
            )
        return None
    shifts = _numbers(maps["d2t"])
    if len(shifts) != num_drafted:
        raise refused(f"d2t maps {len(shifts):,} tokens, but draft_vocab_size is {num_drafted:,}")
    tokens = np.arange(num_drafted) + shifts
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise refused(
            f"d2t maps to tokens {tokens.min():,} to {tokens.max():,}, and the model has "
            f"{vocab_size:,}"
        )
    if len(np.unique(tokens)) != num_drafted:
        raise refused("d2t maps two tokens to one")
    if "t2d" in maps:
        has_token = _numbers(maps["t2d"]).astype(bool)
        if len(has_token) != vocab_size:
            raise refused(f"t2d has {len(has_token):,} tokens, and the model {vocab_size:,}")
        if not np.array_equal(np.flatnonzero(has_token), np.sort(tokens)):
            raise refused("t2d marks other tokens than d2t maps to")
    return tokens.astype(np.int32)


def _numbers(tensor: StoredTensor) -> NDArray[np.int64]:
    return tensor.dequantise().reshape(-1).astype(np.int64)
