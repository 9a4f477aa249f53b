"""Models in their real dimensions without data: tensors take no memory, weights are
generated on the device.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from headrace.backend.cuda import weights
from headrace.backend.cuda.layout import WeightLayout, layout_of
from headrace.backend.cuda.packing import PackedWeight
from headrace.backend.cuda.random_weight import random_weight
from headrace.checkpoint.key_biases import split_key_biases
from headrace.model import tensor_shapes
from headrace.model.spec import ExpertSpec, MlaSpec, ModelSpec, RopeSpec
from headrace.quant.formats import FORMATS, StoredTensor, plain_table
from tests.tables import KINDS, SPARSE_KINDS


def _llama(
    name: str, layers: int, dim: int, heads: tuple[int, int, int], ffn: int, vocab: int
) -> ModelSpec:
    rope = RopeSpec(heads[2], 500_000.0)
    return ModelSpec(
        "llama",
        layers,
        dim,
        *heads,
        ffn,
        vocab,
        131_072,
        1e-5,
        rope,
        name,
        tied_embeddings=layers < 32,
    )


SPECS = {
    "tiny": _llama("tiny", 1, 32, (2, 1, 16), 32, 64),
    "135m": _llama("135m", 30, 576, (9, 3, 64), 1536, 49_152),
    "1b": _llama("1b", 16, 2048, (32, 8, 64), 8192, 128_256),
    "8b": _llama("8b", 32, 4096, (32, 8, 128), 14_336, 128_256),
    "experts": ModelSpec(
        *(
            "gpt_oss",
            24,
            2880,
            64,
            8,
            64,
            2880,
            201_088,
            131_072,
            1e-5,
            RopeSpec(64, 150_000.0),
            "experts",
        ),
        experts=ExpertSpec(32, 4, 2880, bias=True, router_bias=True),
        windows=(128, 0) * 12,
        sinks=True,
        activation="clamped_swiglu",
        qkv_bias=True,
        output_bias=True,
    ),
    "latent": ModelSpec(
        *(
            "deepseek_v2",
            27,
            2048,
            16,
            16,
            192,
            1408,
            102_400,
            131_072,
            1e-6,
            RopeSpec(64),
            "latent",
        ),
        mla=MlaSpec(512, 128, is_absorbed=True),
        experts=ExpertSpec(64, 6, 1408, normalised=False, shared_ffn_dim=2816),
    ),
}
SPECS["biased"] = replace(SPECS["1b"], name="biased", qkv_bias=True)
SPECS |= {
    "tiny experts": replace(
        SPECS["experts"],
        **{
            "num_layers": 1,
            "dim": 32,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "ffn_dim": 32,
            "vocab_size": 64,
        },
        **{
            "rope": RopeSpec(16),
            "windows": (5,),
            "experts": ExpertSpec(4, 2, 32, bias=True, router_bias=True),
        },
    ),
    "tiny latent": replace(
        SPECS["latent"],
        **{
            "num_layers": 1,
            "dim": 32,
            "num_heads": 2,
            "num_kv_heads": 2,
            "head_dim": 24,
            "ffn_dim": 32,
            "vocab_size": 64,
        },
        **{"rope": RopeSpec(8), "mla": MlaSpec(24, 16, is_absorbed=True), "experts": None},
    ),
}
"""SmolLM2-135M, Llama 3.2 1B and 3.1 8B, gpt-oss-20b, DeepSeek-V2-Lite, Llama 3.2 1B with key
biases, and models small
enough for the interpreter.
"""


def hollow_tensors(spec: ModelSpec, format: str, experts: str = "") -> dict[str, StoredTensor]:
    """Tensors of a model that share one byte: matrices in a format, experts perhaps in
    another, vectors in F32.
    """
    tensors = {
        name: hollow_tensor(
            name,
            ((experts if ".experts." in name else "") or format) if len(shape) > 1 else "F32",
            shape,
        )
        for name, shape in tensor_shapes(spec).items()
    }
    if spec.name == "biased":
        tensors |= {
            name: StoredTensor.from_floats(name, np.full(tensor.shape, 100.0, np.float32))
            for name, tensor in tensors.items()
            if name.endswith(".k_bias")
        }
    return split_key_biases(spec, tensors)


def hollow_tensor(name: str, format: str, shape: tuple[int, ...]) -> StoredTensor:
    """A matrix or a vector whose bytes are all the same byte; `format` is a file's, or of
    `tests/tables.py`.
    """
    rows, cols = prod(shape[:-1]), shape[-1]
    if spec := (KINDS | SPARSE_KINDS).get(format):
        form, tables = plain_table(spec), (rows, spec.num_scales(cols))
        shapes = {
            "codes": (rows, spec.num_codes(cols)),
            "scales": tables,
            "zeros": tables,
            "places": (rows, -(-cols // 8)),
        }
    else:
        form = FORMATS[format]
        shapes = {
            "codes": (rows, cols // form.block, form.nbytes),
            "row_scales": (rows,),
            "block_scales": (rows, cols // 32),
        }
    parts = {
        part: np.broadcast_to(np.zeros((), kind.dtype), shapes[part])
        for part, kind in form.parts.items()
    }
    return StoredTensor(name, form, shape, parts)


def make_weights_in_place(device: torch.device) -> None:
    """Replace weights by random numbers from the device's generator, and vectors by 1."""

    def pack(tensors: Sequence[StoredTensor], layout: WeightLayout | None = None) -> PackedWeight:
        return random_weight(
            layout or layout_of(tensors[0]),
            sum(tensor.rows for tensor in tensors),
            tensors[0].cols,
            device,
        )

    names: Any = weights
    names.pack = pack
    names.pack_vector = lambda tensor: torch.ones(tensor.cols, device=device)
