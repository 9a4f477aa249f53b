"""Tiny Llama folders whose linear layers, but not the head, are stored as a quantisation method has them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.backend import compile_program, forward
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.config import KvConfig
from headrace.model import trace_model
from tests.backend.batches import Sequence, batch_of

Quantise = Callable[[NDArray[np.float32]], tuple[dict[str, torch.Tensor], NDArray[np.float32]]]
"""Of a matrix: the tensors that stand for it, by what follows the dot of their names, and the values that these stand for."""

TOKENS = (np.arange(45) * 37 % 96).tolist()
NEAR_TIE = 0.05
"""Of the largest logit: what int8 activations may turn round."""


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def write(folder: Path, config: dict[str, Any], quantise: Quantise, metadata: dict[str, str] | None = None) -> LlamaForCausalLM:
    """Write the folder; gives the model with the weights that it stands for."""
    model, state = tiny_llama(), {}
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.ndim == 2 and "proj" in name:
                parts, values = quantise(value.numpy())
                state |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in parts.items()}
                value.copy_(torch.from_numpy(values))
            else:
                state[name] = value
    configure(folder, config)
    save_file(state, folder / "model.safetensors", metadata)
    return model


def configure(folder: Path, config: dict[str, Any]) -> None:
    """The `config.json` of such a folder, with this `quantization_config`."""
    tiny_llama().config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": config, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values))


def logits_of(checkpoint: Checkpoint, backend: str) -> NDArray[np.float32]:
    program, kv = trace_model(checkpoint.spec, checkpoint.tensors), KvConfig((4,), 32, "f32")
    executable = compile_program(backend, program, checkpoint.tensors, kv, 2)
    return forward(executable, batch_of([Sequence([1, 3, 0], 32)], [TOKENS], [([], [])], False)).logits.copy()


def check_logits(folder: Path, model: LlamaForCausalLM, bound: float = 0.03) -> None:
    """The reference computes what transformers does, and the kernels what the reference does; the same tokens up to near-ties."""
    checkpoint = open_checkpoint(folder)
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0].numpy()
    exact, got = logits_of(checkpoint, "reference"), logits_of(checkpoint, "cpu")
    assert np.linalg.norm(exact - want) < 1e-4 * np.linalg.norm(want)
    assert np.linalg.norm(got - exact) < bound * np.linalg.norm(exact)
    highest = np.sort(exact, axis=1)
    is_clear = highest[:, -1] - highest[:, -2] > NEAR_TIE * np.abs(exact).max()
    assert is_clear.sum() >= 10
    assert np.array_equal(got.argmax(axis=1)[is_clear], exact.argmax(axis=1)[is_clear])
