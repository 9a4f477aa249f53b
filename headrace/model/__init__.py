"""Model families by name, and the programs and tensors of their models."""

from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module

from headrace.errors import UnsupportedModelError
from headrace.model.family import Family
from headrace.model.spec import ModelSpec
from headrace.program.op import Weight
from headrace.program.ops import Linear
from headrace.program.trace import Program, Tracer, trace
from headrace.quant.formats import StoredTensor

_FILES = {
    "llama": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen_moe",
    "qwen3_moe": "qwen_moe",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "phi2": "phi2",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "cohere": "cohere",
    "cohere2": "cohere",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "gpt2": "gpt2",
    "gpt_bigcode": "gpt2",
    "gptj": "gptj",
    "gpt_neox": "gpt_neox",
    "falcon": "falcon",
    "bloom": "bloom",
    "mpt": "mpt",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "gpt_oss": "gpt_oss",
}
"""The file of each family, which has it under its name in capitals."""


class _Families(Mapping[str, Family]):
    """The families by name. The file of one is imported when it is asked for, since a process needs
    one of them, or two.
    """

    def __getitem__(self, name: str) -> Family:
        family: Family = getattr(import_module(f"headrace.model.{_FILES[name]}"), name.upper())
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(_FILES)

    def __len__(self) -> int:
        return len(_FILES)


FAMILIES: Mapping[str, Family] = _Families()


def trace_model(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> Program:
    """The program of a model. Raises UnsupportedModelError, or FormatError where spec and tensors
    disagree.
    """
    return trace(partial(_family(spec).forward, spec), tensors)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the equations of a model ask for, in their order: its shape [rows, cols],
    or [cols] of a vector.
    """
    shapes = _Shapes()
    _family(spec).forward(spec, shapes)
    return shapes.found


def linear_weights(spec: ModelSpec) -> set[str]:
    """The tensors of a model that rows are multiplied with, by itself each: not those of experts,
    or of single heads.
    """
    shapes = _Shapes()
    _family(spec).forward(spec, shapes)
    return {op.weight.name for op in shapes.ops if isinstance(op, Linear)}


class _Shapes(Tracer):
    """Remembers which tensors are asked for."""

    def __init__(self) -> None:
        super().__init__({})
        self.found: dict[str, tuple[int, ...]] = {}

    def weight(self, name: str, rows: int, cols: int) -> Weight:
        self.found[name] = (rows, cols)
        return Weight(name=name, rows=rows, cols=cols, nbytes=0)

    def vector(self, name: str, size: int) -> Weight:
        self.found[name] = (size,)
        return Weight(name=name, rows=1, cols=size, nbytes=0)


def _family(spec: ModelSpec) -> Family:
    if spec.architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"unknown architecture {spec.architecture!r}; there are: {', '.join(FAMILIES)}"
        )
    return FAMILIES[spec.architecture]
