import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from headrace.checkpoint.gguf import Metadata, RawValue
from headrace.checkpoint.note import GGUF_NOTE, GGUF_PRICE
from headrace.convert.destination import atomic_output, check_disk_space
from headrace.convert.file_tensors import FileTensor
from headrace.convert.gguf.header import gguf_file_layout, raw, u32
from headrace.convert.gguf.metadata import describe_model
from headrace.convert.gguf.mixtures import MIXTURES, mixture_facts, tensor_types
from headrace.convert.matrices import ProgressCallback, encode_rows
from headrace.convert.source_model import SourceModel, gguf_layout
from headrace.convert.tensor_writer import PlannedTensor, TensorWriter
from headrace.errors import FormatError
from headrace.model.fields import Fields, JsonFields
from headrace.quant.arrays import Floats
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.record import frozen

_CHUNK_VALUES = 1 << 22
_QUANTISATION_VERSION = 2
"""`GGML_QNT_VERSION`."""


@frozen(eq=False)
class GgufContents:
    fields: Fields
    shapes: Mapping[str, tuple[int, ...]]
    """Rows first, in the file's order."""
    tensors: Mapping[str, StoredTensor]
    """Tensors that can be copied."""


@frozen(eq=False)
class GgufPlan:
    mixture: str
    contents: GgufContents
    tensors: Mapping[str, PlannedTensor]
    """In the order of the source file, or of the program."""


def gguf_contents(source: SourceModel) -> GgufContents:
    """Raises UnsupportedModelError."""
    metadata = source.checkpoint.tokenizer_source
    if isinstance(metadata, Metadata) and not source.is_rebuilt:
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        return GgufContents(metadata, shapes, source.tensors)
    description = describe_model(source.spec, source.file_tensors(as_folder=False))
    fields = JsonFields(description.values, "the GGUF file")
    return GgufContents(fields, description.shapes, description.rope_factors)


def plan_gguf(
    source: SourceModel, mixture: str, embeddings: Mapping[str, str] | None = None
) -> GgufPlan:
    """Plan a mixture, perhaps with other formats of `embed` and `head`.

    Raises UnsupportedModelError, and RequestError for an unknown mixture.
    """
    contents = gguf_contents(source)
    layout = gguf_layout(source.spec.architecture).tensors
    chosen = {layout[name].name: stored for name, stored in (embeddings or {}).items()}
    types = tensor_types(mixture, contents.shapes, mixture_facts(contents.fields), chosen)
    tensors = {name: _planned(name, shape, types[name]) for name, shape in contents.shapes.items()}
    return GgufPlan(mixture, contents, tensors)


def _planned(name: str, shape: tuple[int, ...], tensor_type: str) -> PlannedTensor:
    stored = FORMATS[tensor_type]
    nbytes = math.prod(shape) // stored.block * stored.nbytes
    return PlannedTensor(name, tensor_type, shape, nbytes)


def write_gguf(
    source: SourceModel,
    out: Path,
    plan: GgufPlan,
    importance: Mapping[str, Floats],
    on_progress: ProgressCallback,
) -> None:
    """Write the file; tensors in their final format are copied.

    `importance` [cols] weights squared errors. Raises HeadraceError, RequestError for a value
    that is not finite, and UnsupportedModelError; nothing remains then.
    """
    metadata = _metadata(source, plan.contents) | {
        "general.file_type": u32(MIXTURES[plan.mixture].file_type),
        "general.quantization_version": u32(_QUANTISATION_VERSION),
    }
    layout = gguf_file_layout(metadata, plan.tensors.values())
    check_disk_space(out, layout.size)

    file_tensors = source.file_tensors(as_folder=False)
    model_tensors = source.checkpoint.tensors
    total, done = sum(tensor.nbytes for tensor in plan.tensors.values()), 0
    with atomic_output(out) as scratch:
        file = TensorWriter(scratch, layout)
        for name, planned in plan.tensors.items():
            stored, tensor = plan.contents.tensors.get(name), file_tensors.get(name)
            if stored and stored.format.name == planned.format:
                file.write(name, [stored.parts["codes"]])
            elif tensor:
                weights = importance.get(tensor.slices[0].name)
                file.write(name, _blocks(tensor, planned, model_tensors, weights))
            elif stored:
                values = stored.dequantise().reshape(-1, stored.cols)
                file.write(name, [encode_rows(name, planned.format, values)])

            if stored:
                stored.release()
            for part in tensor.slices if tensor else ():
                model_tensors[part.name].release()
            done += planned.nbytes
            on_progress(done / total)
        file.close()


def _metadata(source: SourceModel, contents: GgufContents) -> dict[str, RawValue]:
    metadata = source.checkpoint.tokenizer_source
    values: dict[str, Any] = dict(contents.fields)
    result = {}
    if isinstance(metadata, Metadata):
        # The parts of a split model become one file.
        kept = ("general.", "tokenizer.") if source.is_rebuilt else ("",)
        result = {
            key: metadata.raw(key)
            for key in metadata
            if key.startswith(kept) and not key.startswith("split.")
        }
        if not source.is_rebuilt:
            values = {}
    else:
        from headrace.convert.gguf.tokenizer import tokenizer_values

        values |= tokenizer_values(source.checkpoint)
    if source.note:
        values[GGUF_NOTE] = source.note
    if source.price:
        values[GGUF_PRICE] = json.dumps(dict(source.price))
    for key, value in values.items():
        try:
            result[key] = raw(value)
        except UnicodeEncodeError as error:
            raise FormatError(f"{key} is not valid Unicode: {error.reason}") from error
    return result


def _blocks(
    tensor: FileTensor,
    planned: PlannedTensor,
    model_tensors: Mapping[str, StoredTensor],
    importance: Floats | None,
) -> Iterator[NDArray[Any]]:
    rows, cols = (1, tensor.shape[0]) if len(tensor.shape) == 1 else tensor.shape
    step = rows if tensor.is_transposed else max(1, _CHUNK_VALUES // cols)
    for first in range(0, rows, step):
        values = tensor.values(model_tensors, first, min(first + step, rows))
        yield encode_rows(planned.name, planned.format, values.reshape(-1, cols), importance)
