"""Architectures by name: each is a function over the op vocabulary that traces to a program."""

from collections.abc import Callable, Mapping
from functools import partial

from headrace.errors import UnsupportedModelError
from headrace.model import llama
from headrace.model.spec import ModelSpec
from headrace.program.ops import Value
from headrace.program.trace import Program, Tracer, trace
from headrace.quant.formats import StoredTensor

ARCHITECTURES: dict[str, Callable[[ModelSpec, Tracer], Value]] = {
    "llama": llama.forward,
    "mistral": llama.forward,
    "qwen2": llama.forward,
}


def trace_model(spec: ModelSpec, tensors: Mapping[str, StoredTensor]) -> Program:
    """The program of a model. Raises UnsupportedModelError, or FormatError where spec and tensors disagree."""
    if spec.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(f"unknown architecture {spec.architecture!r}; there are: {', '.join(ARCHITECTURES)}")
    return trace(partial(ARCHITECTURES[spec.architecture], spec), tensors)
