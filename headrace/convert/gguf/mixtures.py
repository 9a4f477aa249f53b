"""The mixtures of formats in GGUF files.

Rules are llama.cpp's (`llama_tensor_get_type`). MXFP4 is our own mixture.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from headrace.errors import RequestError
from headrace.model.fields import Fields
from headrace.quant.spec import PLAIN
from headrace.record import frozen


class Mixture(NamedTuple):
    format: str
    file_type: int
    """`general.file_type` (`enum llama_ftype` in llama.h)."""


MIXTURES = {
    "F32": Mixture("F32", 0),
    "F16": Mixture("F16", 1),
    "BF16": Mixture("BF16", 32),
    "Q8_0": Mixture("Q8_0", 7),
    "Q6_K": Mixture("Q6_K", 18),
    "Q5_K_M": Mixture("Q5_K", 17),
    "Q5_K_S": Mixture("Q5_K", 16),
    "Q5_1": Mixture("Q5_1", 9),
    "Q5_0": Mixture("Q5_0", 8),
    "Q4_K_M": Mixture("Q4_K", 15),
    "Q4_K_S": Mixture("Q4_K", 14),
    "Q4_1": Mixture("Q4_1", 3),
    "Q4_0": Mixture("Q4_0", 2),
    "IQ4_NL": Mixture("IQ4_NL", 25),
    "IQ4_XS": Mixture("IQ4_XS", 30),
    "MXFP4": Mixture("MXFP4", 38),
    "MXFP4_MOE": Mixture("MXFP4", 38),
    "Q3_K_L": Mixture("Q3_K", 13),
    "Q3_K_M": Mixture("Q3_K", 12),
    "Q3_K_S": Mixture("Q3_K", 11),
    "Q2_K": Mixture("Q2_K", 10),
    "Q2_K_S": Mixture("Q2_K", 21),
    "TQ2_0": Mixture("TQ2_0", 37),
    "TQ1_0": Mixture("TQ1_0", 36),
}
"""From the finest to the coarsest."""

_LOGITS, _TOKENS = "output.weight", "token_embd.weight"
_VALUES = ("attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight")
_KEPT = ("_norm.weight", "ffn_gate_inp.weight")
"""Norms of heads, and routers, stay in float32."""
_KEPT_WHOLE = ("position_embd.weight", "token_types.weight")

_LONG_BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0")
_SHORT_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}


@frozen
class MixtureFacts:
    architecture: str
    layers: int
    heads_per_kv_head: int = 1
    experts: int = 0

    @property
    def has_few_values(self) -> bool:
        """Whether llama.cpp takes it for a 70B model, whose value matrices are small."""
        grouped = self.architecture == "qwen2" or (
            self.architecture == "llama" and self.heads_per_kv_head > 1
        )
        return grouped and self.layers == 80


def mixture_facts(metadata: Fields) -> MixtureFacts:
    """Raises FormatError."""
    name = metadata.string("general.architecture")
    heads = metadata.integer(f"{name}.attention.head_count")
    kv_heads = metadata.integer(f"{name}.attention.head_count_kv", heads)
    layers = metadata.integer(f"{name}.block_count")
    experts = metadata.integer(f"{name}.expert_count", 0)
    return MixtureFacts(name, layers, heads // max(kv_heads, 1), experts)


def tensor_types(
    mixture: str,
    shapes: Mapping[str, tuple[int, ...]],
    facts: MixtureFacts,
    chosen: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Choose the format of each tensor by name and shape; `chosen` are others than the rule's.

    Raises RequestError.
    """
    if mixture not in MIXTURES:
        raise RequestError(
            f"unknown mixture of formats {mixture[:40]!r}; use one of {', '.join(MIXTURES)}"
        )
    logits = _LOGITS if _LOGITS in shapes else _TOKENS
    values = sorted((name for name in shapes if name.endswith(_VALUES)), key=_layer)
    order = {name: index for index, name in enumerate(values)}
    main_format = MIXTURES[mixture].format

    types = {}
    for name, shape in shapes.items():
        if not _is_quantised(name, shape):
            types[name] = "F32"
            continue
        if main_format in PLAIN:
            types[name] = main_format
            continue
        if name == logits:
            preferred = _logits_type(mixture, shape[-1], facts)
        elif mixture in ("MXFP4", "MXFP4_MOE"):
            is_dense = mixture == "MXFP4_MOE" and len(shape) < 3
            preferred = "Q8_0" if name == _TOKENS or is_dense else "MXFP4"
        elif name in order:
            preferred = _value_type(mixture, order[name], len(order), facts)
        else:
            preferred = _other_type(mixture, name, facts)
        types[name] = _fitting(preferred, shape[-1])
    return {**types, **(chosen or {})}


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    is_matrix = any(size > 1 for size in shape[:-1])
    return (
        is_matrix
        and name.endswith("weight")
        and name not in _KEPT_WHOLE
        and not any(part in name for part in _KEPT)
    )


def _fitting(preferred: str, cols: int) -> str:
    if preferred in _LONG_BLOCKS and cols % 256:
        preferred = _SHORT_BLOCKS.get(preferred, "Q4_0")
    return "F16" if cols % 32 else preferred


def _layer(name: str) -> int:
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else 0


def _has_more(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _logits_type(mixture: str, cols: int, facts: MixtureFacts) -> str:
    main_format = MIXTURES[mixture].format
    misfit = cols % (256 if main_format in _LONG_BLOCKS else 32)
    needs_8_bits = main_format in ("Q8_0", "MXFP4") or facts.architecture == "falcon" or misfit
    return "Q8_0" if needs_8_bits else "Q6_K"


def _value_type(mixture: str, index: int, count: int, facts: MixtureFacts) -> str:
    chosen = MIXTURES[mixture].format
    if facts.experts == 8:
        return "Q8_0"
    if mixture == "Q2_K":
        chosen = "Q4_K" if facts.heads_per_kv_head >= 4 else "Q3_K"
    elif mixture == "Q2_K_S" and facts.heads_per_kv_head >= 4:
        chosen = "Q4_K"
    elif mixture in ("IQ4_NL", "IQ4_XS") and facts.heads_per_kv_head >= 4:
        chosen = "Q5_K"
    elif mixture == "Q3_K_M":
        chosen = "Q5_K" if index < 2 else "Q4_K"
    elif mixture == "Q3_K_L" or (mixture == "Q4_K_S" and index < 4):
        chosen = "Q5_K"
    elif mixture in ("Q4_K_M", "Q5_K_M") and _has_more(index, count):
        chosen = "Q6_K"
    return "Q5_K" if facts.has_few_values and chosen in ("Q3_K", "Q4_K") else chosen


def _other_type(mixture: str, name: str, facts: MixtureFacts) -> str:
    if "ffn_down" in name:
        return _down_type(mixture, _layer(name), facts)
    if name.endswith("attn_output.weight"):
        return _attention_output_type(mixture, facts)
    if name.endswith("attn_k.weight") and facts.experts == 8:
        return "Q8_0"
    if name == _TOKENS and mixture in ("TQ1_0", "TQ2_0"):
        return "Q4_K"
    return MIXTURES[mixture].format


def _down_type(mixture: str, layer: int, facts: MixtureFacts) -> str:
    falcon, layers = facts.architecture == "falcon", facts.layers
    first, more = layer < layers // 8, _has_more(layer, layers)
    match mixture:
        case "Q2_K":
            return "Q3_K"
        case "Q2_K_S" if first:
            return "Q4_K"
        case "Q3_K_M":
            return "Q5_K" if layer < layers // 16 else "Q4_K" if more or not falcon else "Q3_K"
        case "Q3_K_L":
            return "Q4_K" if falcon else "Q5_K"
        case "Q4_K_M" if falcon:
            return "Q6_K" if layer < layers // 16 else "Q5_K" if more else "Q4_K"
        case "Q4_K_M" | "Q5_K_M" if more:
            return "Q6_K"
        case "IQ4_NL" | "IQ4_XS" if first:
            return "Q5_K"
        case "Q4_K_S" if first and not falcon:
            return "Q5_K"
    return MIXTURES[mixture].format


def _attention_output_type(mixture: str, facts: MixtureFacts) -> str:
    if facts.architecture == "falcon":
        more = {"Q3_K_L": "Q4_K"}
    elif facts.experts == 8:
        more = dict.fromkeys(
            ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS"), "Q5_K"
        )
    else:
        more = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
    return more.get(mixture, MIXTURES[mixture].format)
