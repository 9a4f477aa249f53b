"""The protocol of quantisation methods."""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.errors import UnsupportedModelError
from headrace.model.fields import shown
from headrace.quant.formats import StoredTensor

Config = Mapping[str, Any]
Tensors = Mapping[str, StoredTensor]

KV_SCALES = (".k_scale", ".v_scale", ".kv_scale")
"""Ends of names of scales of an 8-bit KV cache, which is coarser than ours; nothing reads them."""


class Method(Protocol):
    """A quantisation method of checkpoints. Its matrices have a format of `FORMATS`, or one
    made with `table_format`.
    """

    supported: str

    def check(self, config: Config) -> None:
        """Raise UnsupportedModelError, which names the field."""
        ...

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        """Make tensors with the names and shapes of an unquantised model.

        Raises FormatError for malformed parts, UnsupportedModelError for unsupported parts.
        """
        ...


def refusal(field: str, value: Any, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config.json: quantization_config: {field} = {shown(value)} is not supported; "
        f"supported: {supported}"
    )
