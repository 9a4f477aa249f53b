"""Model families by name, and the programs and tensors of their models."""

from collections.abc import Mapping
from functools import partial

from headrace.errors import UnsupportedModelError
from headrace.model.family import Family
from headrace.model.llama import LLAMA
from headrace.model.mistral import MISTRAL
from headrace.model.qwen2 import QWEN2
from headrace.model.spec import ModelSpec
from headrace.program.op import Weight
from headrace.program.trace import Program, Tracer, trace
from headrace.quant.formats import StoredTensor

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
    )
}


def trace_model(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> Program:
    """The program of a model. Raises UnsupportedModelError, or FormatError where spec and tensors disagree."""
    return trace(partial(_family(spec).forward, spec), tensors)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the equations of a model ask for, in their order: its shape [rows, cols], or [cols] of a vector."""
    shapes = _Shapes()
    _family(spec).forward(spec, shapes)
    return shapes.found


class _Shapes(Tracer):
    """Remembers which tensors are asked for."""

    def __init__(self) -> None:
        super().__init__({})
        self.found: dict[str, tuple[int, ...]] = {}

    def weight(self, name: str, rows: int, cols: int) -> Weight:
        self.found[name] = (rows, cols)
        return Weight(name, rows, cols, 0)

    def vector(self, name: str, size: int) -> Weight:
        self.found[name] = (size,)
        return Weight(name, 1, size, 0)


def _family(spec: ModelSpec) -> Family:
    if spec.architecture not in FAMILIES:
        raise UnsupportedModelError(f"unknown architecture {spec.architecture!r}; there are: {', '.join(FAMILIES)}")
    return FAMILIES[spec.architecture]
