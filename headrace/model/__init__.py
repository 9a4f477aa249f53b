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
    "opt": "opt",
    "nemotron": "nemotron",
    "mpt": "mpt",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "gpt_oss": "gpt_oss",
}
"""Each file defines the family under its name in capitals."""


def _family_in(file: str, name: str) -> Family:
    family: Family = getattr(import_module(f"headrace.model.{file}"), name.upper())
    return family


class _Families(Mapping[str, Family]):
    """Families by name, imported at first use."""

    def __getitem__(self, name: str) -> Family:
        return _family_in(_FILES[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(_FILES)

    def __len__(self) -> int:
        return len(_FILES)


FAMILIES: Mapping[str, Family] = _Families()
_DRAFTERS = {"eagle1": "eagle1", "eagle3": "eagle3", "mtp": "mtp"}
"""Families of drafters, which are no models of their own."""


def trace_model(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> Program:
    """The program of a model.

    Raises UnsupportedModelError for an unknown architecture, and FormatError for other tensors
    than the specification's.
    """
    return trace(partial(_family(spec).forward, spec), tensors)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """[rows, cols] or [cols] of each tensor, in the order of use."""
    tracer = _ShapeTracer()
    _family(spec).forward(spec, tracer)
    return tracer.shapes


def linear_weights(spec: ModelSpec) -> set[str]:
    """The matrices of linear ops, without experts and matrices of single heads."""
    tracer = _ShapeTracer()
    _family(spec).forward(spec, tracer)
    return {op.weight.name for op in tracer.ops if isinstance(op, Linear)}


class _ShapeTracer(Tracer):
    def __init__(self) -> None:
        super().__init__({})
        self.shapes: dict[str, tuple[int, ...]] = {}

    def weight(self, name: str, rows: int, cols: int) -> Weight:
        self.shapes[name] = (rows, cols)
        return Weight(name=name, rows=rows, cols=cols, nbytes=0)

    def vector(self, name: str, size: int) -> Weight:
        self.shapes[name] = (size,)
        return Weight(name=name, rows=1, cols=size, nbytes=0)


def _family(spec: ModelSpec) -> Family:
    if spec.architecture in _DRAFTERS:
        return _family_in(_DRAFTERS[spec.architecture], spec.architecture)
    if spec.architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"unknown architecture {spec.architecture!r}; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[spec.architecture]
