"""Makes the 1B-shaped model of the benchmarks: the dimensions of Llama-3.2-1B, a vocabulary of 49,152, random weights, tied head.

    python benchmarks/shaped.py Q4_0 Q8_0 BF16 --out .bench/models

Writes one GGUF file for each format (0.6, 1.1 and 2.1 GB), with the tokenizer of the default model, from the same random
numbers: 1.07 billion parameters whose speed is that of a trained model, and whose text is noise. Needs the package gguf.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 2048, 16, 32, 8, 64, 8192, 49152
BLOCK = {
    "attn_q": (HEADS * HEAD_DIM, WIDTH),
    "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD_DIM),
    "ffn_gate": (FFN, WIDTH),
    "ffn_up": (FFN, WIDTH),
    "ffn_down": (WIDTH, FFN),
}


def tokenizer_of(model: Path) -> list[gguf.ReaderField]:
    """The tokenizer's fields of a GGUF file."""
    return [field for name, field in gguf.GGUFReader(model).fields.items() if name.startswith("tokenizer.")]


def write(path: Path, quantisation: str, tokenizer: list[gguf.ReaderField]) -> None:
    """Write the model with its matrices in `quantisation`."""
    rng = np.random.default_rng(0)
    stored = gguf.GGMLQuantizationType[quantisation]
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    writer.add_name("shaped-1b")
    writer.add_context_length(131072)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantisation}"])
    for field in tokenizer:
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)

    def matrix(name: str, rows: int, cols: int) -> None:
        weights = rng.standard_normal((rows, cols), np.float32) / np.sqrt(np.float32(cols))
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weights, stored), raw_dtype=stored)

    matrix("token_embd", VOCAB, WIDTH)
    for layer in range(LAYERS):
        for name, shape in BLOCK.items():
            matrix(f"blk.{layer}.{name}", *shape)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
        print(f"\r{path.name}: layer {layer + 1}/{LAYERS}", end="", flush=True)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print()


def main() -> None:
    """Write the files that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="+", choices=["Q4_0", "Q8_0", "BF16"])
    parser.add_argument("--out", type=Path, default=Path(".bench/models"))
    parser.add_argument("--tokenizer", type=Path, help="GGUF file that lends its tokenizer (default: the default model)")
    args = parser.parse_args()
    if args.tokenizer is None:
        from headrace.checkpoint.source import resolve

        args.tokenizer = resolve("smollm2")
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(args.tokenizer)
    for name in args.formats:
        path = args.out / f"shaped-1b-{name}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            write(part, name, tokenizer)
            part.rename(path)


if __name__ == "__main__":
    main()
