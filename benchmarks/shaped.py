"""Makes models for benchmarks: sizes of well-known models, a vocabulary of 49,152, random weights.

    python benchmarks/shaped.py 1b Q4_0 Q8_0 BF16 --out .bench/models
    python benchmarks/shaped.py 16x2 Q4_0
    python benchmarks/shaped.py 64x8 Q4_0
    python benchmarks/shaped.py 8b Q4_K

`1b` has the sizes of Llama-3.2-1B (0.6, 1.1 and 2.1 GB), and `8b` of Llama-3.1-8B (4.0 GB in Q4_K).
`16x2` has 16 experts with top_k 2 (equations of Mixtral), and `64x8` has 64 with top_k 8 (equations
and sizes of OLMoE), 3.7 GB each in Q4_0. `narrow` is small enough for very long prompts. Each file
has the tokenizer of the default model. The models are as fast as trained models, and their text is
noise. All experts of a layer share random weights. With K-quants and IQ types, all matrices have
the same format and random codes. Needs the package gguf.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray


class Shape(NamedTuple):
    """Sizes of a model, and its architecture in GGUF."""

    architecture: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    experts: int = 0
    top_k: int = 0

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of a layer in the chosen format; one of each kind for experts."""
        up, kind = (self.ffn, self.width), "_exps" if self.experts else ""
        return {
            "attn_q": (self.heads * self.head_dim, self.width),
            "attn_k": (self.kv_heads * self.head_dim, self.width),
            "attn_v": (self.kv_heads * self.head_dim, self.width),
            "attn_output": (self.width, self.heads * self.head_dim),
            f"ffn_gate{kind}": up,
            f"ffn_up{kind}": up,
            f"ffn_down{kind}": up[::-1],
        }

    def vectors(self) -> dict[str, int]:
        norms = {"attn_norm": self.width, "ffn_norm": self.width}
        if self.architecture == "olmoe":
            norms |= {
                "attn_q_norm": self.heads * self.head_dim,
                "attn_k_norm": self.kv_heads * self.head_dim,
            }
        return norms


SHAPES = {
    "1b": Shape("llama", 2048, 16, 32, 8, 64, 8192),
    "8b": Shape("llama", 4096, 32, 32, 8, 128, 14336),
    "16x2": Shape("llama", 2048, 16, 32, 8, 64, 4096, 16, 2),
    "64x8": Shape("olmoe", 2048, 16, 16, 16, 128, 1024, 64, 8),
    "narrow": Shape("llama", 128, 4, 4, 1, 32, 256),
}
VOCAB = 49152

BLOCK_SCALES = {
    "Q2_K": {80: 2**-7, 82: 2**-6},
    "Q3_K": {108: 2**-8},
    "Q4_K": {0: 2**-10, 2: 2**-7},
    "Q5_K": {0: 2**-11, 2: 2**-7},
    "Q6_K": {208: 2**-11},
    "IQ1_S": {0: 2**-9},
    "IQ2_XXS": {0: 2**-12},
    "IQ3_S": {0: 2**-13},
    "IQ4_XS": {0: 2**-16},
}
"""Byte offsets of the float16 scales in a block of each K-quant and IQ type, and their values, of
the size in trained weights.
"""


def tokenizer_of(model: Path) -> list[gguf.ReaderField]:
    """The tokenizer's fields of a GGUF file."""
    return [
        field
        for name, field in gguf.GGUFReader(model).fields.items()
        if name.startswith("tokenizer.")
    ]


def random_blocks(
    rng: np.random.Generator, stored: gguf.GGMLQuantizationType, rows: int, cols: int
) -> NDArray[np.uint8]:
    """Rows of a matrix in a K-quant or an IQ type, with random codes and the scales of
    `BLOCK_SCALES`.
    """
    block, nbytes = gguf.GGML_QUANT_SIZES[stored]
    blocks = (
        np.frombuffer(rng.bytes(rows * cols // block * nbytes), np.uint8).reshape(-1, nbytes).copy()
    )
    for at, scale in BLOCK_SCALES[stored.name].items():
        blocks[:, at : at + 2] = np.float16([scale]).view(np.uint8)
    return blocks.reshape(rows, -1)


def write(path: Path, shape: Shape, quantisation: str, tokenizer: list[gguf.ReaderField]) -> None:
    """Write the model with its matrices in `quantisation`."""
    rng = np.random.default_rng(0)
    stored = gguf.GGMLQuantizationType[quantisation]
    writer = gguf.GGUFWriter(path, shape.architecture, use_temp_file=True)
    writer.add_name(path.stem)
    writer.add_context_length(131072)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    types = gguf.LlamaFileType.__members__
    writer.add_file_type(types.get(f"MOSTLY_{quantisation}") or types[f"MOSTLY_{quantisation}_M"])
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.top_k)
    for field in tokenizer:
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)

    def random(rows: int, cols: int) -> NDArray[np.float32]:
        return rng.standard_normal((rows, cols), np.float32) / np.sqrt(np.float32(cols))

    def matrix(name: str, rows: int, cols: int) -> None:
        is_random = quantisation in BLOCK_SCALES
        packed = (
            random_blocks(rng, stored, rows, cols)
            if is_random
            else gguf.quants.quantize(random(rows, cols), stored)
        )
        if name.endswith("_exps"):
            packed = np.broadcast_to(packed, (shape.experts, *packed.shape)).copy()
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=stored)

    matrix("token_embd", VOCAB, shape.width)
    for layer in range(shape.layers):
        for name, size in shape.matrices().items():
            matrix(f"blk.{layer}.{name}", *size)
        if shape.experts:
            writer.add_tensor(
                f"blk.{layer}.ffn_gate_inp.weight", random(shape.experts, shape.width)
            )
        for name, length in shape.vectors().items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(length, np.float32))
        print(f"\r{path.stem}: layer {layer + 1}/{shape.layers}", end="", flush=True)
    writer.add_tensor("output_norm.weight", np.ones(shape.width, np.float32))
    if shape.architecture == "olmoe":
        matrix("output", VOCAB, shape.width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print()


def main() -> None:
    """Write the missing files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("formats", nargs="+", choices=["Q4_0", "Q8_0", "BF16", *BLOCK_SCALES])
    parser.add_argument("--out", type=Path, default=Path(".bench/models"))
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="GGUF file with the tokenizer (default: the default model)",
    )
    args = parser.parse_args()
    if args.tokenizer is None:
        from headrace.checkpoint.source import resolve

        args.tokenizer = resolve("smollm2")
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(args.tokenizer)
    for name in args.formats:
        path = args.out / f"shaped-{args.shape}-{name}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            write(part, SHAPES[args.shape], name, tokenizer)
            part.rename(path)


if __name__ == "__main__":
    main()
