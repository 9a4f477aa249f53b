"""Tiny Llama folders whose linear layers, except the head, are stored by a quantisation method."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from tests.folders import tiny_llama, write_folder

Quantise = Callable[[NDArray[np.float32]], tuple[dict[str, torch.Tensor], NDArray[np.float32]]]
"""Maps a matrix to its stored tensors, by the last part of their names, and to their values."""


def write(
    folder: Path, config: dict[str, Any], quantise: Quantise, metadata: dict[str, str] | None = None
) -> LlamaForCausalLM:
    """Write the folder, and return the model with the dequantised weights."""

    def stored(name: str, value: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        parts, values = quantise(value.detach().numpy())
        layer = name.removesuffix("weight")
        return torch.from_numpy(values), {
            f"{layer}{part}": tensor.contiguous() for part, tensor in parts.items()
        }

    model = tiny_llama(64, 96)
    write_folder(folder, model, config, stored, metadata)
    return model
