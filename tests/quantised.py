"""Tiny Llama folders whose linear layers, but not the head, are stored as a quantisation method has
them: parts of each layer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from tests.folders import tiny_llama, write_folder

Quantise = Callable[[NDArray[np.float32]], tuple[dict[str, torch.Tensor], NDArray[np.float32]]]
"""Of a matrix: the tensors that stand for it, by what follows the dot of their names, and the
values that these stand for.
"""


def write(
    folder: Path, config: dict[str, Any], quantise: Quantise, metadata: dict[str, str] | None = None
) -> LlamaForCausalLM:
    """Write the folder; gives the model with the weights that it stands for."""

    def stored(name: str, value: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        parts, values = quantise(value.detach().numpy())
        layer = name.removesuffix("weight")
        return torch.from_numpy(values), {
            f"{layer}{part}": tensor.contiguous() for part, tensor in parts.items()
        }

    model = tiny_llama(64, 96)
    write_folder(folder, model, config, stored, metadata)
    return model
