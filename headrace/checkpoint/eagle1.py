"""Folders of EAGLE-1 and EAGLE-2 drafters: the authors' layout, vLLM's, and that of `speculators`.

The authors' configuration is that of a model with one layer (SafeAILab/EAGLE). vLLM writes it into
`model`, and `speculators` into `transformer_layer_config`, with the layer as `transformer` and the
matrix `fc` as `fusion_fc`.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

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
from headrace.errors import RequestError
from headrace.model.eagle1 import TENSORS
from headrace.model.family import Layout
from headrace.model.fields import JsonFields
from headrace.model.spec import DrafterSpec, ModelSpec

_SECTIONS = ("transformer_layer_config", "model")
_FAMILIES = ("llama", "qwen2")
"""Families of the drafter's layer that are published."""
_NEUTRAL = {
    "layernorms": (False,),
    "add_para_norm": (False,),
    "skip_prenorm": (True,),
    "skip_output_norm": (True,),
}
_LAYOUT = Layout(
    architectures=("eagle1",), tensors=TENSORS, ignored=("rotary_emb.inv_freq", "embed_layernorm")
)


def is_eagle1(names: Collection[str]) -> bool:
    """Whether tensors of a folder are those of an EAGLE-1 or -2 drafter."""
    own = {_own_name(name) for name in names}
    return "fc.weight" in own and "layers.0.self_attn.q_proj.weight" in own


def open_eagle1(path: Path, config: JsonFields, target: Checkpoint) -> Drafter:
    """Open the EAGLE-1 or -2 drafter in a folder with this configuration.

    Raises as `open_checkpoint`, and RequestError if it belongs to another model.
    """
    stored = {_own_name(name): tensor for name, tensor in read_folder(path).items()}
    spec = _spec(config, target.spec, stored)
    check_target(path.name, spec, target.spec)
    if target.spec.norm != "rms" or target.spec.norm_bias:
        raise RequestError(
            f"draft_model '{path.name}' reads rows after the root mean square norm of its model, "
            "and this model has another norm; choose a drafter that was trained for this model"
        )

    head = target.tensors["embed" if target.spec.tied_embeddings else "head"]
    places = {"embed": target.tensors["embed"], "target_norm": target.tensors["norm"], "head": head}
    stored["norm.weight"] = target.tensors["norm"]
    borrowed = {
        name: tensor
        for name, tensor in places.items()
        if name == "target_norm" or TENSORS[name].name not in stored
    }
    stored |= {TENSORS[name].name: tensor for name, tensor in borrowed.items()}
    tensors = assemble(spec, _LAYOUT, stored, path.name)
    check_finite(path.name, {name: t for name, t in tensors.items() if name not in borrowed})
    return Drafter(spec, with_lent(tensors, target), tokens=None)


def _spec(config: JsonFields, target: ModelSpec, names: Collection[str]) -> ModelSpec:
    """The specification of a drafter with tensors of these names."""
    config.require_neutral(_NEUTRAL)
    layer = next((config.section(name) for name in _SECTIONS if name in config), config)
    layer.require_neutral(_NEUTRAL)
    spec = layer_spec(layer, _FAMILIES)
    drafter = DrafterSpec(
        taps=(target.num_layers,),
        target_dim=spec.dim,
        vocab_size=spec.vocab_size,
        fuse_bias="fc.bias" in names,
    )
    spec = replace(
        spec,
        architecture="eagle1",
        num_layers=1,
        windows=(),
        tied_embeddings=False,
        qkv_bias="layers.0.self_attn.q_proj.bias" in names,
        drafter=drafter,
    )
    return checked_spec(spec, config.where)


def _own_name(name: str) -> str:
    bare = name.removeprefix("model.").replace("fusion_fc.", "fc.")
    return (
        f"layers.0.{bare.removeprefix('transformer.')}" if bare.startswith("transformer.") else bare
    )
