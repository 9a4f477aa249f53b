"""The protocol of quantisation methods: checking a `quantization_config`, and reading
the folder's tensors.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.errors import UnsupportedModelError
from headrace.model.fields import shown
from headrace.quant.formats import StoredTensor

Config = Mapping[str, Any]
Tensors = Mapping[str, StoredTensor]


class Method(Protocol):
    """A quantisation method of checkpoints, registered in `quantisation/__init__.py`.

    Its number formats are in `FORMATS`, with values in `quant/dequantise.py`, or they
    are made of a `QuantSpec` and a function that unpacks rows (`table_format`;
    `quantisation/tables.py` has common parts).
    """

    supported: str
    """The supported variants, for messages."""

    def check(self, config: Config) -> None:
        """Raise UnsupportedModelError, which names the field, for a configuration that
        is not supported.
        """
        ...

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        """Join the folder's tensors to those of a model without quantisation, with its
        names and shapes.

        Codes, scales, zero points and indices arrive as plain tensors and become the
        parts of one tensor, as views; other tensors stay. Raises FormatError for
        missing or malformed parts, UnsupportedModelError for parts that are not
        supported.
        """
        ...


def refusal(field: str, value: Any, supported: str) -> UnsupportedModelError:
    """The error for an unsupported field of `quantization_config`."""
    return UnsupportedModelError(
        f"config.json: quantization_config: {field} = {shown(value)} is not supported; "
        f"supported: {supported}"
    )
