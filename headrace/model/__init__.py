"""Model families by name, and the programs and tensors of their models."""

from collections.abc import Mapping
from functools import partial

from headrace.errors import UnsupportedModelError
from headrace.model.bloom import BLOOM
from headrace.model.cohere import COHERE, COHERE2
from headrace.model.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from headrace.model.falcon import FALCON
from headrace.model.family import Family
from headrace.model.gemma import GEMMA2, GEMMA3
from headrace.model.gpt2 import GPT2, GPT_BIGCODE
from headrace.model.gpt_neox import GPT_NEOX
from headrace.model.gpt_oss import GPT_OSS
from headrace.model.gptj import GPTJ
from headrace.model.granite import GRANITE
from headrace.model.llama import LLAMA
from headrace.model.mistral import MISTRAL
from headrace.model.mixtral import MIXTRAL
from headrace.model.mpt import MPT
from headrace.model.olmo2 import OLMO2
from headrace.model.olmoe import OLMOE
from headrace.model.phi2 import PHI2
from headrace.model.phi3 import PHI3
from headrace.model.qwen2 import QWEN2
from headrace.model.qwen3 import QWEN3
from headrace.model.qwen_moe import QWEN2_MOE, QWEN3_MOE
from headrace.model.smollm3 import SMOLLM3
from headrace.model.spec import ModelSpec
from headrace.model.stablelm import STABLELM
from headrace.model.starcoder2 import STARCODER2
from headrace.program.op import Weight
from headrace.program.ops import Linear
from headrace.program.trace import Program, Tracer, trace
from headrace.quant.formats import StoredTensor

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, GEMMA2, GEMMA3, PHI2, PHI3, SMOLLM3, GRANITE, OLMO2, OLMOE),
        *(COHERE, COHERE2, STABLELM, STARCODER2, GPT2, GPT_BIGCODE, GPTJ, GPT_NEOX, FALCON, BLOOM, MPT),
        *(DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS),
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


def linear_weights(spec: ModelSpec) -> set[str]:
    """The tensors of a model that rows are multiplied with, by itself each: not those of experts, or of single heads."""
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
        return Weight(name, rows, cols, 0)

    def vector(self, name: str, size: int) -> Weight:
        self.found[name] = (size,)
        return Weight(name, 1, size, 0)


def _family(spec: ModelSpec) -> Family:
    if spec.architecture not in FAMILIES:
        raise UnsupportedModelError(f"unknown architecture {spec.architecture!r}; there are: {', '.join(FAMILIES)}")
    return FAMILIES[spec.architecture]
