"""What a quantisation method is: it knows its `quantization_config`, and what the tensors of such a
folder stand for.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.errors import UnsupportedModelError
from headrace.model.fields import shown
from headrace.quant.formats import StoredTensor

Config = Mapping[str, Any]
Tensors = Mapping[str, StoredTensor]


class Method(Protocol):
    """A way to quantise checkpoints, one file each; a line in `quantisation/__init__.py` makes it
    known.

    A format of numbers that none had before is a line of `FORMATS` and its meaning in
    `quant/dequantise.py`, or it is made of a `QuantSpec` and a function that reads rows code by
    code (`table_format`; `quantisation/tables.py` has what several methods share).
    """

    supported: str
    """What of it can be computed, for messages."""

    def check(self, config: Config) -> None:
        """Refuse what cannot be computed, by UnsupportedModelError naming the field."""
        ...

    def assemble(self, config: Config, tensors: Tensors, where: str) -> dict[str, StoredTensor]:
        """The tensors of the folder as a model without quantisation would name and shape them.

        Those that belong together (codes, scales, zero points, indices, ...) come as plain numbers,
        and become the parts of one tensor, as views; the others stay. Raises FormatError for parts
        that are missing, misshapen or no scales, UnsupportedModelError for what has no meaning
        here.
        """
        ...


def refusal(field: str, value: Any, supported: str) -> UnsupportedModelError:
    """The error that names a field of `quantization_config`."""
    return UnsupportedModelError(
        f"config.json: quantization_config: {field} = {shown(value)} is not supported; "
        f"what is: {supported}"
    )
