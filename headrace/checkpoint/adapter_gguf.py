"""LoRA adapters in GGUF files, as llama.cpp's `convert_lora_to_gguf.py` writes them.

A weight X has `X.weight.lora_a` [rank, cols] and `X.weight.lora_b` [rows, rank]; token embeddings
have [vocab, rank] and [dim, rank], all experts of a layer [experts, rank, cols] and [experts, rows,
rank]. The scale is `adapter.lora.alpha` / rank, or 1 without an alpha.
A norm's weight is whole (llama.cpp leaves it out).
"""

import re
from pathlib import Path

import numpy as np

from headrace.checkpoint.adapter_experts import add_stacks
from headrace.checkpoint.adapter_parts import AdapterParts, Floats, checked_pair, floats_of
from headrace.checkpoint.gguf import is_adapter, read_gguf
from headrace.errors import FormatError, UnsupportedModelError
from headrace.program.adapter import LowRank

_NAME = re.compile(r"(?P<module>.+)\.weight\.(?P<part>lora_[ab])")
_EXPERTS = re.compile(
    r"(?P<module>blk\.\d+\.ffn_(?P<part>gate|up|down|gate_up)_exps)\.weight\.lora_(?P<half>[ab])"
)
_EMBEDDING, _NORM = "token_embd", "_norm.weight"


def read_gguf_adapter(path: Path, architectures: tuple[str, ...]) -> AdapterParts:
    """Raises ModelNotFoundError, FormatError or UnsupportedModelError."""
    file = read_gguf(path)
    metadata = file.metadata
    if not is_adapter(metadata):
        raise UnsupportedModelError(
            f"{path.name}: the file is a model, not an adapter (general.type = "
            f"{str(metadata.get('general.type'))[:40]}); load it as the model"
        )
    if metadata.get("adapter.type") != "lora":
        raise metadata.unsupported("adapter.type", "; lora is")
    if metadata.get("adapter.alora.invocation_tokens") is not None:
        raise metadata.unsupported("adapter.alora.invocation_tokens")
    architecture = metadata.string("general.architecture")
    if architecture not in architectures:
        raise UnsupportedModelError(
            f"{path.name}: the adapter is for a {architecture[:40]} model, and the model is "
            f"{' or '.join(architectures)}; load the model that it was trained for"
        )
    parts = AdapterParts(where=path.name)
    pairs: dict[str, dict[str, Floats]] = {}
    stacked: dict[tuple[str, str], dict[str, Floats]] = {}
    for name, tensor in file.tensors.items():
        if name.endswith(_NORM) and len(tensor.shape) == 1:
            parts.weights[name] = tensor
            continue
        if expert := _EXPERTS.fullmatch(name):
            halves = stacked.setdefault((expert["module"], expert["part"]), {})
            halves[expert["half"]] = floats_of(tensor, path.name)
            continue
        match = _NAME.fullmatch(name)
        if match is None or len(tensor.shape) != 2:
            raise UnsupportedModelError(
                f"{path.name}: tensor {name} {list(tensor.shape)} is not a low-rank matrix of a "
                "linear layer, experts or an embedding; merge the adapter with llama.cpp "
                "(llama-export-lora) and load the merged model"
            )
        pairs.setdefault(match["module"], {})[match["part"]] = tensor.dequantise()
    if not pairs and not parts.weights and not stacked:
        raise FormatError(f"{path.name}: no tensors")
    alpha = metadata.number("adapter.lora.alpha", 0.0)

    def scale_of(rank: int) -> float:
        return alpha / rank if alpha else 1.0

    add_stacks(parts.stacks, stacked, scale_of, path.name)
    for module, halves in pairs.items():
        if module == _EMBEDDING and "lora_a" in halves:
            halves = {**halves, "lora_a": halves["lora_a"].T}
        down, up = checked_pair(module, halves, path.name)
        scale = scale_of(len(down))
        if module == _EMBEDDING:
            parts.embeddings[module] = LowRank(np.ascontiguousarray(up.T), down.T, scale)
        else:
            parts.low_rank[module] = LowRank(down, up, scale)
    return parts
