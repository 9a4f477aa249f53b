"""Number formats of the embedding and of the head, which no method calibrates.

The names of the options are those of llama-quantize. A tied model has one matrix for both.
"""

from collections.abc import Mapping

from headrace.errors import RequestError
from headrace.model.spec import ModelSpec
from headrace.quant.encode import ENCODERS
from headrace.quant.format_names import LLM_INT8, W8A8, named_format
from headrace.quant.formats import FORMATS
from headrace.quant.spec import PLAIN, QuantSpec

EMBED, HEAD = "embed", "head"
OPTIONS = {EMBED: "--token-embedding-type", HEAD: "--output-tensor-type"}
FolderType = QuantSpec | str
"""A format, or the name of a plain type in `PLAIN`."""

_DEFAULT = "int8-row"
_FITTING = "int2, int3, int4 or int8 with groups or rows, bf16, f16 or f32"


def chosen_types(
    spec: ModelSpec, token_embedding: str | None, output: str | None, default: str | None
) -> dict[str, str]:
    """Names of formats by matrix, `embed` and `head`; a matrix without a name stays as it is.

    Raises RequestError for two formats of one matrix, and for a format of a head that the model
    does not have.
    """
    if output and not spec.has_head:
        raise RequestError(f"{OPTIONS[HEAD]} {output}: the model has no head; leave it out")
    if spec.tied_embeddings:
        if output and token_embedding and output != token_embedding:
            raise RequestError(
                f"{OPTIONS[EMBED]} {token_embedding} and {OPTIONS[HEAD]} {output} differ, but the "
                "model has one matrix for both; give one of them"
            )
        names = {EMBED: token_embedding or output or default}
    else:
        names = {EMBED: token_embedding or default, HEAD: output or default}
    return {name: chosen for name, chosen in names.items() if chosen}


def folder_types(
    spec: ModelSpec, to: str, token_embedding: str | None, output: str | None
) -> dict[str, str]:
    """Choose the formats in a folder whose other matrices are `to`. Raises RequestError."""
    target, default = named_format(to), None
    if _is_packed(target):
        default = _DEFAULT if target.bits < 8 else to
    names = chosen_types(spec, token_embedding, output, default)
    for name, chosen in names.items():
        parsed = folder_type(OPTIONS[name], chosen)
        is_bitsandbytes = target.codebook in ("nf4", "fp4") or target.has_wide_outliers
        if isinstance(parsed, QuantSpec) and is_bitsandbytes:
            raise RequestError(
                f"{OPTIONS[name]} {chosen}: bitsandbytes (--to {to}) has no quantised embeddings "
                "and heads; use bf16, f16 or f32"
            )
    return names


def folder_type(option: str, name: str) -> FolderType:
    """Parse a format of a folder. Raises RequestError, which names the option."""
    if name.upper() in PLAIN:
        return name.upper()
    try:
        spec = named_format(name)
    except RequestError as error:
        raise RequestError(f"{option}: {error}") from None
    if not _is_packed(spec):
        raise RequestError(f"{option} {name}: no folder has such embeddings; use {_FITTING}")
    return spec


def gguf_types(spec: ModelSpec, token_embedding: str | None, output: str | None) -> dict[str, str]:
    """Choose the formats in a GGUF file; others are the mixture's. Raises RequestError."""
    names = chosen_types(spec, token_embedding, output, None)
    for name, chosen in names.items():
        block = FORMATS[chosen.upper()].block if chosen.upper() in ENCODERS else 0
        if not block or spec.dim % block:
            fitting = [key for key, encoder in ENCODERS.items() if not spec.dim % encoder.block]
            raise RequestError(
                f"{OPTIONS[name]} {chosen[:40]!r}: no format of a GGUF file with rows of "
                f"{spec.dim:,} columns; use one of {', '.join(fitting)}"
            )
    return {name: chosen.upper() for name, chosen in names.items()}


def parsed_types(names: Mapping[str, str]) -> dict[str, FolderType]:
    return {name: folder_type(OPTIONS[name], chosen) for name, chosen in names.items()}


def _is_packed(spec: QuantSpec) -> bool:
    """Whether compressed-tensors packs it, as lookups need."""
    return spec.codebook == "integer" and spec not in (W8A8, LLM_INT8)
