"""Decides if the head is the embedding, as transformers 5 does (`tie_weights`).

The file overrules `tie_word_embeddings`: a head of other values stays a head, and a model with
only one of both matrices uses it twice. A model without either a head or a tie has no logits.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from headrace.model.family import Layout
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor

_CHUNK_VALUES = 1 << 22


class Heads(NamedTuple):
    spec: ModelSpec
    tensors: dict[str, StoredTensor]
    """With the embedding under its name, and a head only if the model has its own."""
    equal_head: str
    """The name of a head that was left out because it equals the embedding, or empty."""
    note: str


def settle_head(
    spec: ModelSpec,
    layout: Layout,
    tensors: Mapping[str, StoredTensor],
    *,
    is_stated: bool = True,
) -> Heads:
    """Set `tied_embeddings` and `has_head` by the tensors of a folder.

    `is_stated`: whether the configuration states the tie; else a head of its own needs no note.
    """
    tensors, own = dict(tensors), layout.for_names(tensors.keys()).tensors
    if "head" not in own:
        return Heads(spec, tensors, "", "")
    embed_name, head_name = own["embed"].name, own["head"].name
    embedding, head = tensors.get(embed_name), tensors.get(head_name)

    if spec.tied_embeddings and head and not embedding:
        tensors[embed_name] = replace(tensors.pop(head_name), name=embed_name)
        return Heads(spec, tensors, "", "")
    if spec.tied_embeddings and head and embedding:
        if is_equal(embedding, head):
            del tensors[head_name]
            return Heads(spec, tensors, head_name, "")
        note = (
            f"tie_word_embeddings is true, but {head_name} differs from {embed_name}; "
            "the model uses both. Set tie_word_embeddings to false to silence this note"
        )
        return Heads(replace(spec, tied_embeddings=False), tensors, "", note if is_stated else "")
    if not spec.tied_embeddings and embedding and not head:
        note = f"no {head_name}, and tie_word_embeddings is false: the model only computes "
        spec = replace(spec, tied_embeddings=True, has_head=False)
        return Heads(spec, tensors, "", note + "embeddings")
    return Heads(spec, tensors, "", "")


def is_equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Compare values in chunks, up to the first difference."""
    if a.shape != b.shape:
        return False
    step = max(1, _CHUNK_VALUES // a.cols)
    is_raw = a.format.name == b.format.name and a.parts.keys() == b.parts.keys() == {"codes"}
    for first in range(0, a.rows, step):
        rows = slice(first, first + step)
        if is_raw and a.row_order is None and b.row_order is None:
            same = np.array_equal(a.parts["codes"][rows], b.parts["codes"][rows])
        else:
            index = range(first, min(first + step, a.rows))
            same = np.array_equal(a.dequantise_rows(index), b.dequantise_rows(index))
        if not same:
            break
    else:
        b.release()
        return True
    a.release()
    b.release()
    return False
