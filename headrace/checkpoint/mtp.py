"""Opens the layer for drafts that follows the last layer in a model's files (`model/mtp.py`)."""

from dataclasses import replace

from headrace.checkpoint.assemble import assemble
from headrace.checkpoint.drafter import Drafter
from headrace.checkpoint.load import Checkpoint, checked_spec
from headrace.errors import RequestError
from headrace.model import FAMILIES
from headrace.model.family import Layout
from headrace.model.mtp import TENSORS
from headrace.model.spec import DrafterSpec


def open_mtp(target: Checkpoint) -> Drafter:
    """Open the first layer for drafts of a model. Raises RequestError if its files have none."""
    name, spec = target.path.name, target.spec
    layout = FAMILIES[spec.architecture].config
    prefix = layout.layer_prefix if layout else ""
    own = f"{prefix}{spec.num_layers}."
    stored = {
        f"{prefix}0.{key.removeprefix(own)}": tensor
        for key, tensor in target.stored.items()
        if prefix and key.startswith(own)
    }
    if not layout or not stored:
        raise RequestError(
            f"draft_model is 'mtp', but {name} has no layers for drafts (multi-token prediction); "
            "choose a model with them, such as DeepSeek-V3, or another draft model"
        )

    place = TENSORS["target_norm"].name
    stored[place] = target.stored[place]
    experts = replace(spec.experts, dense_layers=()) if spec.experts else None
    drafter = replace(
        spec,
        architecture="mtp",
        num_layers=1,
        windows=(),
        rotated=(),
        experts=experts,
        tied_embeddings=False,
        drafter=DrafterSpec(
            taps=(spec.num_layers,), target_dim=spec.dim, vocab_size=spec.vocab_size
        ),
    )
    tensors = assemble(
        checked_spec(drafter, name),
        Layout(architectures=("mtp",), tensors={**layout.tensors, **TENSORS}),
        stored,
        name,
    )
    return Drafter(drafter, tensors, tokens=None)
