"""Writing a model as a GGUF file: its key-values (`gguf_contents.py`), and its tensors in the
formats of a mixture.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.convert.disassemble import Stored
from headrace.convert.gguf.contents import Contents, contents_of, metadata_of
from headrace.convert.gguf.header import gguf_plan, u32
from headrace.convert.gguf.mixtures import MIXTURES, facts_of, tensor_types
from headrace.convert.matrices import Tell, encoded_rows
from headrace.convert.output import check_room, unfinished
from headrace.convert.source_model import Original
from headrace.convert.tensor_file import PlannedTensor, TensorFile
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.record import frozen

_CHUNK_VALUES = 1 << 22
"""Numbers that are encoded at a time."""
_QUANTISATION_VERSION = 2
"""Of ggml's block formats (`GGML_QNT_VERSION`)."""


@frozen(eq=False)
class GgufPlan:
    """What a file will have."""

    mixture: str
    contents: Contents
    tensors: Mapping[str, PlannedTensor]
    """In the order of the original, or, where that is a folder, of the program."""


def plan_gguf(original: Original, mixture: str) -> GgufPlan:
    """The plan of a file in one of `MIXTURES`.

    Raises UnsupportedModelError for a folder whose model no GGUF file describes, RequestError for a
    mixture that is none.
    """
    contents = contents_of(original)
    types = tensor_types(mixture, contents.shapes, facts_of(contents.fields))
    return GgufPlan(
        mixture,
        contents,
        {name: _planned(name, shape, types[name]) for name, shape in contents.shapes.items()},
    )


def _planned(name: str, shape: tuple[int, ...], kind: str) -> PlannedTensor:
    stored = FORMATS[kind]
    return PlannedTensor(name, kind, shape, math.prod(shape) // stored.block * stored.nbytes)


def write_gguf(
    original: Original,
    out: Path,
    plan: GgufPlan,
    importance: Mapping[str, NDArray[np.float32]],
    tell: Tell,
) -> None:
    """Write it; `tell` hears how much is done, from 0 to 1.

    `importance` is what errors in the columns of a matrix of ours count [cols]; all the same where
    it has none. What has its format already is copied. Raises HeadraceError where the disk refuses,
    RequestError naming a tensor with a number that is not finite, UnsupportedModelError for a
    folder's tokenizer that no GGUF file describes; nothing is left at `out` then.
    """
    values = metadata_of(original, plan.contents) | {
        "general.file_type": u32(MIXTURES[plan.mixture].file_type),
        "general.quantization_version": u32(_QUANTISATION_VERSION),
    }
    header = gguf_plan(values, plan.tensors.values())
    check_room(out, header.size)
    ours, tensors = original.stored(as_folder=False), original.checkpoint.tensors
    total, done = sum(tensor.nbytes for tensor in plan.tensors.values()), 0
    with unfinished(out) as place:
        file = TensorFile(place, header)
        for name, planned in plan.tensors.items():
            source, stored = plan.contents.tensors.get(name), ours.get(name)
            if source and source.format.name == planned.format:
                file.write(name, [source.parts["codes"]])
            elif stored:
                file.write(
                    name, _blocks(stored, planned, tensors, importance.get(stored.shares[0].name))
                )
            elif source:
                file.write(
                    name,
                    [
                        encoded_rows(
                            name, planned.format, source.dequantise().reshape(-1, source.cols)
                        )
                    ],
                )
            if source:
                source.release()
            for share in stored.shares if stored else ():
                tensors[share.name].release()
            done += planned.nbytes
            tell(done / total)
        file.close()


def _blocks(
    stored: Stored,
    planned: PlannedTensor,
    tensors: Mapping[str, StoredTensor],
    importance: NDArray[np.float32] | None,
) -> Iterator[NDArray[Any]]:
    """A tensor in its new format, some rows at a time."""
    rows, cols = (1, stored.shape[0]) if len(stored.shape) == 1 else stored.shape
    step = rows if stored.is_transposed else max(1, _CHUNK_VALUES // cols)
    for first in range(0, rows, step):
        values = stored.values(tensors, first, min(first + step, rows))
        yield encoded_rows(planned.name, planned.format, values.reshape(-1, cols), importance)
