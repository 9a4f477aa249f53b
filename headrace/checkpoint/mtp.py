"""Opens the layer for drafts that a model has in its own files (`model/mtp.py`)."""

from dataclasses import replace

from headrace.checkpoint.assemble import assemble
from headrace.checkpoint.draft_layers import layout_of, num_draft_layers
from headrace.checkpoint.drafter import Drafter, with_lent
from headrace.checkpoint.load import Checkpoint, checked_spec
from headrace.errors import RequestError
from headrace.model.family import DraftLayers, Layout, TensorSource
from headrace.model.spec import DrafterSpec, ModelSpec


def open_mtp(target: Checkpoint) -> Drafter:
    """Open the first layer for drafts of a model. Raises RequestError if its files have none."""
    name, layout = target.path.name, layout_of(target)
    layers = layout.draft_layers if layout else None
    if not layout or not layers or not num_draft_layers(target):
        raise RequestError(
            f"draft_model is 'mtp', but {name} has no layers for drafts (multi-token prediction); "
            "choose a model with them, such as DeepSeek-V3, or another draft model"
        )
    if not layers.tensors:
        raise RequestError(
            f"draft_model is 'mtp', and {name} has layers for drafts, but Headrace has no "
            f"equations for them in {target.spec.architecture} models; choose another draft model"
        )

    spec = _spec(target.spec, layers)
    own = f"{layers.prefix}{target.spec.num_layers if layers.follows_last else 0}."
    home = layout.tensors["layers.{}.attn_norm"].name.partition("{}")[0] + "0."
    stored = {
        home + key.removeprefix(own): tensor
        for key, tensor in target.stored.items()
        if key.startswith(own)
    }
    places = {ours: TensorSource(home + file) for ours, file in layers.tensors.items()}
    places["target_norm"] = layout.tensors["norm"]

    # Layers that have no embedding or head read the model's.
    head = target.tensors["embed" if target.spec.tied_embeddings else "head"]
    borrowed = {"embed": target.tensors["embed"], "head": head}
    borrowed = {
        ours: tensor
        for ours, tensor in borrowed.items()
        if ours not in places or places[ours].name not in stored
    }
    for ours in borrowed:
        places.setdefault(ours, TensorSource(f"{home}{ours}"))
    borrowed["target_norm"] = target.tensors["norm"]
    stored |= {places[ours].name: tensor for ours, tensor in borrowed.items()}

    sources = Layout(
        architectures=("mtp",),
        tensors={**layout.tensors, **places},
        alternatives=layout.alternatives,
    )
    tensors = assemble(checked_spec(spec, name), sources, stored, name)
    return Drafter(spec, with_lent(tensors, target), tokens=None)


def _spec(target: ModelSpec, layers: DraftLayers) -> ModelSpec:
    drafter = DrafterSpec(
        taps=(target.num_layers,),
        target_dim=target.dim,
        vocab_size=target.vocab_size,
        row_first=layers.row_first,
        drafts_from_normed=layers.drafts_from_normed,
    )
    return replace(
        target,
        architecture="mtp",
        num_layers=1,
        windows=(),
        rotated=(),
        experts=replace(target.experts, dense_layers=()) if target.experts else None,
        tied_embeddings=False,
        drafter=drafter,
    )
