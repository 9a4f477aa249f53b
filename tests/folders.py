"""Folders of tiny quantised models, and the results of both backends for them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.backend import forward
from headrace.backend.cpu import executable as cpu
from headrace.backend.reference import executable as reference
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.quantisation import method_of
from headrace.checkpoint.safetensors import read_safetensors
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.quant.formats import StoredTensor
from tests.backend.batches import Sequence, batch_of

TOKENS = 45
_VOCAB = 96
Stored = Callable[[str, torch.Tensor], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""Maps the name and values of a weight to its quantised values and its stored tensors."""


def tiny_llama(hidden: int = 64, ffn: int = 100, *, is_tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": _VOCAB,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 3,
    }
    model = LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_bias=True,
            tie_word_embeddings=is_tied,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def configure(folder: Path, model: LlamaForCausalLM, config: dict[str, Any]) -> None:
    """Write the `config.json` of a model with this `quantization_config`."""
    model.config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": config,
        "architectures": ["LlamaForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(values))


def write_folder(
    folder: Path,
    model: LlamaForCausalLM,
    config: dict[str, Any],
    stored: Stored,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write the folder of a model whose linear layers, except the head, are quantised.

    The model gets the dequantised weights.
    """
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if value.ndim == 2 and "proj" in name:
            values, tensors = stored(name, value)
            value.copy_(values)
            state |= tensors
        else:
            state[name] = value
    configure(folder, model, config)
    save_file(state, folder / "model.safetensors", metadata)


def assembled(
    folder: Path, config: dict[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, StoredTensor]:
    """Return the tensors that a quantisation method reads from a file of `tensors`."""
    save_file(dict(tensors), folder / "part.safetensors")
    return method_of(config).assemble(config, read_safetensors(folder / "part.safetensors"), "a")


def logits_of(
    executable: reference.ReferenceExecutable | cpu.CpuExecutable, chunks: list[int]
) -> NDArray[np.float32]:
    """Return the logits of a prompt computed in chunks of these sizes, [tokens, vocab]."""
    sequence, tokens, found = (
        Sequence([1, 3, 0], 32),
        (np.arange(TOKENS) * 37 % _VOCAB).tolist(),
        [],
    )
    for rows in chunks:
        batch = batch_of(
            [sequence], [tokens[sequence.computed : sequence.computed + rows]], [([], [])], False
        )
        found.append(forward(executable, batch).logits.copy())
        sequence.computed += rows
    return np.concatenate(found)


def backends(
    checkpoint: Checkpoint, isa: str, threads: int = 2
) -> tuple[reference.ReferenceExecutable, cpu.CpuExecutable]:
    program, kv = trace_model(checkpoint.spec, checkpoint.tensors), KvConfig((4,), 32, "f32")
    tensors = checkpoint.tensors
    return reference.compile(program, tensors, kv, 1), cpu.CpuExecutable(
        program, tensors, kv, threads, isa
    )


def check_engine(folder: Path, model: LlamaForCausalLM, near: float = 0.03) -> Checkpoint:
    """Check that both backends agree with transformers on the same weights.

    The reference backend must be equal; the cpu backend must give equal tokens except near ties.
    """
    checkpoint = open_checkpoint(folder)
    with torch.no_grad():
        want = model(torch.arange(TOKENS)[None] * 37 % _VOCAB).logits[0].numpy()
    truth, executable = backends(checkpoint, "")
    exact, got = logits_of(truth, [TOKENS]), logits_of(executable, [TOKENS])
    assert np.linalg.norm(exact - want) < 1e-4 * np.linalg.norm(want)
    assert np.linalg.norm(got - exact) < near * np.linalg.norm(exact)
    assert np.array_equal(got, logits_of(executable, [17, 1, 1, TOKENS - 19]))
    gaps = exact.max(axis=1) - np.take_along_axis(exact, got.argmax(axis=1)[:, None], axis=1)[:, 0]
    assert gaps.max() <= 4 * near * exact.std()
    return checkpoint
