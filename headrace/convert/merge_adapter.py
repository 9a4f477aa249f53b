"""Merges an adapter into a model that is converted."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from headrace.convert.source_model import SourceModel
from headrace.errors import UnsupportedModelError
from headrace.model import tensor_shapes
from headrace.program.adapter import Adapter, LowRank, OwnWeight
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.spec import encode_numbers


def merged(source: SourceModel, adapter: Adapter) -> SourceModel:
    """The model with the adapter in its weights; matrices that change become bf16, or float32 if
    they are.

    Raises UnsupportedModelError for biases that the model's files cannot have.
    """
    checkpoint, spec = source.checkpoint, source.spec
    changes = {
        "head" if _is_tied_head(name, change, spec.tied_embeddings) else name: change
        for name, change in adapter.items()
    }
    if "head" in changes and spec.tied_embeddings:
        spec = replace(spec, tied_embeddings=False)
    if unknown := sorted(changes.keys() - tensor_shapes(spec).keys()):
        raise UnsupportedModelError(
            f"the adapter has {unknown[0]}, which files of a {spec.architecture} model with this "
            "configuration do not have; load it as an adapter on the cpu backend"
        )
    tensors = dict(checkpoint.tensors)
    if "head" in changes:
        tensors.setdefault("head", tensors["embed"])
    made = {}
    for name, change in changes.items():
        own = OwnWeight(delta=change) if isinstance(change, LowRank) else change
        made[name] = own.make(name, tensors.get(name))
    result = replace(source, checkpoint=replace(checkpoint, spec=spec, tensors={**tensors, **made}))
    return replace(result, tensors={**source.tensors, **_in_file(result, made.keys())})


def _is_tied_head(name: str, change: LowRank | OwnWeight, is_tied: bool) -> bool:
    return is_tied and name == "embed" and isinstance(change, LowRank)


def _in_file(source: SourceModel, changed: Collection[str]) -> dict[str, StoredTensor]:
    """The changed tensors in the source's shapes."""
    found = {}
    for name, tensor in source.file_tensors(as_folder=source.is_folder).items():
        if not any(part.name in changed for part in tensor.slices):
            continue
        old = source.tensors.get(name)
        values = tensor.values(source.checkpoint.tensors, 0, tensor.shape[0])
        shape = old.shape if old else tensor.shape
        if len(shape) == 1 or (old and old.format.name == "F32"):
            found[name] = StoredTensor.from_floats(name, values.reshape(shape))
        else:
            words = encode_numbers(np.ascontiguousarray(values), "bf16").reshape(-1)
            found[name] = StoredTensor.from_bytes(
                name, FORMATS["BF16"], shape, words.view(np.uint8)
            )
    return found
