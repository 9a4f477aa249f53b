"""Quantisation methods of Hugging Face folders: which there are, and whose a checkpoint is."""

from typing import Any

from headrace.checkpoint.quantisation.awq import Awq
from headrace.checkpoint.quantisation.bitsandbytes import BitsAndBytes
from headrace.checkpoint.quantisation.compressed_tensors import CompressedTensors
from headrace.checkpoint.quantisation.fp8 import Fp8
from headrace.checkpoint.quantisation.gptq import Gptq
from headrace.checkpoint.quantisation.hqq import Hqq
from headrace.checkpoint.quantisation.method import Method, refusal
from headrace.checkpoint.quantisation.mxfp4 import Mxfp4
from headrace.checkpoint.quantisation.torchao import TorchAo

METHODS: tuple[Method, ...] = (CompressedTensors(), Mxfp4(), Gptq(), Awq(), BitsAndBytes(), Fp8(), TorchAo(), Hqq())


def method_of(config: Any) -> Method:
    """The method whose `quantization_config` this is, checked. Raises UnsupportedModelError, which names the field."""
    supported = "; ".join(method.supported for method in METHODS)
    if not isinstance(config, dict):
        raise refusal("all of it", config, supported)
    for method in METHODS:
        if method.claims(config):
            method.check(config)
            return method
    raise refusal("quant_method", config.get("quant_method"), supported)
