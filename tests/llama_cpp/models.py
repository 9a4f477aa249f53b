"""The models for llama.cpp's logits: variants that it can run, with weights of few
values.

Weights depend on the names in files, so that models do not change with transformers.
Few values pack well.
"""

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import transformers
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from tests.families import LINEAR, VARIANTS, YARN, config_of

TOKENS = np.random.default_rng(0).integers(0, 101, 120).tolist()
EVEN_YARN = YARN | {"mscale": 0.9, "mscale_all_dim": 0.9}


class Case(NamedTuple):
    """A variant with changed options."""

    variant: str
    options: dict[str, Any]
    why: str = ""
    """The feature of the variant that llama.cpp does not run."""
    mxfp4: bool = False
    """Whether experts are in MXFP4, as in gpt-oss."""


CASES = {name: Case(name, {}) for name in VARIANTS} | {
    "olmoe": Case("olmoe", {"num_key_value_heads": 4}, "fewer KV heads than query heads"),
    "command-r-plus": Case(
        "command-r-plus",
        {"num_hidden_layers": 64},
        "norms of queries and keys in fewer than 64 layers",
    ),
    "deepseek-v2": Case(
        "deepseek-v2",
        {
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "rope_scaling": EVEN_YARN,
            "rope_theta": 1e4,
        },
        "groups of experts that go by their best score, and an `mscale` other than `mscale_all_dim`",  # noqa: E501
    ),
    "deepseek-v2-lite": Case(
        "deepseek-v2-lite",
        {"num_hidden_layers": 27},
        "queries made of the row itself in other than 26 or 27 layers",
    ),
    "deepseek-v3": Case(
        "deepseek-v3",
        {"rope_scaling": EVEN_YARN, "rope_theta": 1e4},
        "an `mscale` other than `mscale_all_dim`",
    ),
    "phi3-longrope-short": Case(
        "phi3-longrope", {"max_position_embeddings": 1024, "original_max_position_embeddings": 256}
    ),
    "gpt-oss-mxfp4": Case(
        "gpt-oss", {"num_experts_per_tok": 4}, mxfp4=True
    ),  # all of them: rounded rows would choose others
    # GGUF files do not say the scale of scores: it goes by the number of layers, here that of the
    # largest.
    "gemma2-27b": Case("gemma2", {"num_hidden_layers": 46, "query_pre_attn_scalar": 16}),
    "gemma3-27b": Case("gemma3", {"num_hidden_layers": 62, "query_pre_attn_scalar": 16}),
    "gemma3-linear": Case(
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}
NOT_CONVERTED = {
    "opt": "an architecture that it does not know",
    "gpt-j": "an architecture that it does not know",
    "qwen3-moe-mixed": "layers without experts in Qwen3-MoE",
}
NOT_RUN = {
    "qwen3-biases": "biases in Qwen3",
    "deepseek-v2-biases": "biases in DeepSeek-V2, which our GGUF route refuses, too",
    "gpt-oss-full": "gpt-oss without biases",
}
"""Files that llama.cpp's converter writes but llama.cpp does not load."""
UNSAID = {
    "llama-relu": "the activation",
    "llama-dynamic": "the rotary scaling",
    "mistral-window": "the window",
    "mixtral-window": "the window",
    "qwen2-window": "the windows",
    "deepseek-v3-half-split": "the order of rotary pairs",
}
"""Features that a GGUF file cannot describe: it is another model than the folder, for
llama.cpp and for us.
"""
REFUSED = {
    "llama-relu": "activation would be silu instead of relu",
    "opt": "the family opt has no GGUF format",
    "llama-dynamic": "rope would not have the frequencies of the rule dynamic",
    "qwen2-window": r"qwen2\.attention\.sliding_window = 7",
    "qwen3-moe-mixed": "normalised would be True instead of False",
    "deepseek-v2-biases": "qkv_bias would be False instead of True",
    "deepseek-v3-half-split": "is_half_split would be False instead of True",
    "gpt-oss-full": r"windows would be \(128, 0, 128\) instead of \(\)",
    "gpt-j": "the family gptj has no GGUF format",
}
"""Models that we do not convert to GGUF, with our message."""


def save_coarse(name: str, folder: Path) -> None:
    """Save the model of a case as transformers would, with weights of few values."""
    case = CASES[name]
    made: Any = getattr(transformers, VARIANTS[case.variant].model)
    made._from_config(config_of(case.variant, **case.options)).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {tensor: _coarse(tensor, values.shape) for tensor, values in load_file(file).items()}
    if case.mxfp4:
        for tensor in [
            tensor for tensor in tensors if tensor.endswith(("gate_up_proj", "down_proj"))
        ]:
            tensors |= _mxfp4(tensor, tensors.pop(tensor).shape)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
        )
    save_file(tensors, file, {"format": "pt"})


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of a few characters."""
    backend = tokenizers.Tokenizer(models.BPE({chr(33 + i): i for i in range(90)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


def _coarse(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Two values for matrices, 32 for biases and scales."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (
        rng.choice((-3, 3), shape) / 32 if len(shape) > 1 else rng.integers(-8, 24, shape) / 16
    ).astype(np.float32)


def _mxfp4(name: str, shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """Pairs of codes, and exponents, in place of experts' matrices [experts, columns,
    rows].
    """
    experts, cols, rows = shape
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    codes = rng.choice(
        np.array([1, 3, 9, 12], np.uint8), (experts, rows, cols // 32, 2, 16)
    )  # 0.5, 1.5, -0.5, -2
    scales = rng.integers(123, 125, codes.shape[:3], dtype=np.uint8)
    return {
        f"{name}_blocks": codes[..., 0, :] | codes[..., 1, :] << np.uint8(4),
        f"{name}_scales": scales,
    }
