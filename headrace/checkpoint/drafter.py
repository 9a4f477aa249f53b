"""A drafter over rows of a model, opened, and the checks of all its layouts."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.load import Checkpoint
from headrace.errors import FormatError, RequestError
from headrace.model import FAMILIES
from headrace.model.fields import JsonFields
from headrace.model.spec import ModelSpec
from headrace.quant.digest import same_content
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

_CHUNK_ROWS = 1024


@frozen(eq=False)
class Drafter:
    """A drafter that fits a target, opened."""

    spec: ModelSpec
    tensors: Mapping[str, StoredTensor]
    """Those that its files lack are the target's own objects."""
    tokens: NDArray[np.int32] | None
    """The target's token of each of its own [draft vocab]; None: they are the same."""


def layer_spec(layer: JsonFields, families: Sequence[str]) -> ModelSpec:
    """Read the specification of a drafter's layer, which is of one of the families.

    Raises UnsupportedModelError for another family.
    """
    family = layer.string("model_type", "llama")
    if family not in families:
        raise layer.unsupported("model_type", f"; a drafter has a layer of {' or '.join(families)}")
    layout = FAMILIES[family].config
    assert layout
    return layout.spec(layer)


def check_target(name: str, spec: ModelSpec, target: ModelSpec) -> None:
    """Raise RequestError for the drafter of another model.

    A tap at the number of layers is the rows after the last layer.
    """
    drafter = spec.drafter
    assert drafter
    facts = (
        ("hidden size", drafter.target_dim, target.dim),
        ("vocabulary size", spec.vocab_size, target.vocab_size),
    )
    for what, own, needed in facts:
        if own != needed:
            raise RequestError(
                f"draft_model '{name}' drafts for a model with {what} {own:,}, and this model's is "
                f"{needed:,}; choose a drafter that was trained for this model"
            )
    if min(drafter.taps) < 0 or max(drafter.taps) > target.num_layers:
        layers = ", ".join(map(str, drafter.taps))
        raise RequestError(
            f"draft_model '{name}' reads the rows before layers {layers}, and this model has "
            f"layers 0 to {target.num_layers - 1}; choose a drafter that was trained for this model"
        )


def with_lent(tensors: Mapping[str, StoredTensor], target: Checkpoint) -> dict[str, StoredTensor]:
    """Return a drafter's tensors, with the target's own objects for an embedding, head or last norm
    of equal content. A backend can pack these once.
    """
    head = "embed" if target.spec.tied_embeddings else "head"
    places = {"embed": "embed", "head": head, "target_norm": "norm"}
    lent = {ours: target.tensors[name] for ours, name in places.items() if ours in tensors}
    return {
        **tensors,
        **{name: each for name, each in lent.items() if same_content(tensors[name], each)},
    }


def check_finite(name: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise FormatError for a weight that is not finite: such a drafter would never draft."""
    for tensor in tensors.values():
        for first in range(0, tensor.rows, _CHUNK_ROWS):
            rows = range(first, min(first + _CHUNK_ROWS, tensor.rows))
            if not np.isfinite(tensor.dequantise_rows(rows)).all():
                raise FormatError(
                    f"{name}: tensor {tensor.name} has a weight that is not finite; its training "
                    "failed, so choose another drafter"
                )
