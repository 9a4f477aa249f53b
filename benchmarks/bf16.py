"""Writes a model as a Hugging Face folder in bfloat16, for engines that do not compute in the formats of GGUF.

    python benchmarks/bf16.py smollm2 --out .bench/models

The weights are those of the file, dequantised and rounded to bfloat16: such an engine reads more bytes for the same model.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.model.llama import LLAMA
from headrace.model.spec import ModelSpec


def config_of(spec: ModelSpec) -> dict[str, object]:
    """`config.json` of a Llama. Exits for what this short form cannot say."""
    if spec.architecture != "llama" or spec.rope.scaling != "none" or spec.rope.factors or spec.windows or spec.qkv_bias or spec.mlp_bias:
        raise SystemExit(f"{spec.name}: only plain Llama models can be written as bfloat16 here")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied_embeddings,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def values(checkpoint: Checkpoint) -> Iterator[NDArray[np.float32]]:
    """The tensors, rotary rows in the half-split order of Hugging Face files."""
    for name, tensor in checkpoint.tensors.items():
        stored, numbers = LLAMA.config.locate(name)
        found = tensor.dequantise()
        yield found[np.argsort(stored.rows(checkpoint.spec, numbers))] if stored.rows else found


def bf16(values: NDArray[np.float32]) -> bytes:
    """Rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write `config.json` and one safetensors file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(checkpoint.spec), indent=1))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in checkpoint.tensors.items():
        start, end = end, end + 2 * tensor.rows * tensor.cols
        header[LLAMA.config.locate(name)[0].name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for found in values(checkpoint):
            file.write(bf16(found))


def bf16_folder(path: Path, out: Path) -> Path:
    """The folder of a model, written where it is not there yet."""
    folder = out / f"{path.stem}-as-bf16"
    if not folder.exists():
        part = folder.with_suffix(".part")
        write(open_checkpoint(path), part)
        part.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what `headrace pull` takes")
    parser.add_argument("--out", type=Path, default=Path(".bench/models"))
    args = parser.parse_args()
    print(bf16_folder(resolve(args.model), args.out))


if __name__ == "__main__":
    main()
