"""What a GGUF file will say and hold: as the one does that it is made of, or as the model of a
folder is described.
"""

from collections.abc import Mapping
from typing import Any

from headrace.checkpoint.gguf import Metadata, RawValue
from headrace.convert.gguf.header import raw
from headrace.convert.gguf.metadata import described
from headrace.convert.source_model import Original
from headrace.errors import FormatError
from headrace.model.fields import Fields, JsonFields
from headrace.quant.formats import StoredTensor
from headrace.record import frozen


@frozen(eq=False)
class Contents:
    """A file before its tensors have formats."""

    fields: Fields
    """The key-values; of a folder those of its tokenizer are left out."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of all tensors, rows first, under the file's names and in its order."""
    tensors: Mapping[str, StoredTensor]
    """Those that are there as they may be written: all, or of a folder what follows from the
    specification.
    """


def contents_of(original: Original) -> Contents:
    """The contents. Raises UnsupportedModelError for the model of a folder that no GGUF file
    describes.
    """
    metadata = original.checkpoint.tokenizer_source
    if isinstance(metadata, Metadata):
        return Contents(
            metadata,
            {name: tensor.shape for name, tensor in original.tensors.items()},
            original.tensors,
        )
    found = described(original.checkpoint.spec, original.stored(as_folder=False))
    return Contents(JsonFields(found.values, "the GGUF file"), found.shapes, found.factors)


def metadata_of(original: Original, contents: Contents) -> dict[str, RawValue]:
    """All key-values, as they are written.

    Raises UnsupportedModelError for a folder's tokenizer that no GGUF file describes, FormatError
    for text that is no Unicode.
    """
    metadata = original.checkpoint.tokenizer_source
    if isinstance(metadata, Metadata):
        return {key: metadata.raw(key) for key in metadata}
    from headrace.convert.gguf.tokenizer import tokenizer_values

    values: dict[str, Any] = {**contents.fields, **tokenizer_values(original.checkpoint)}
    found = {}
    for key, value in values.items():
        try:
            found[key] = raw(value)
        except UnicodeEncodeError as error:
            raise FormatError(f"{key} is not valid Unicode: {error.reason}") from error
    return found
