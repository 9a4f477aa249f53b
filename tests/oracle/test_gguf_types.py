"""A GGUF file of each looked-up or table type, written by gguf-py, through the engine."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.quant.formats import FORMATS
from tests.backend.stored import random_stored
from tests.checkpoint.conftest import element_type, metadata, value_type
from tests.folders import TOKENS, backends, logits_of

TYPES = [name for name, form in FORMATS.items() if form.table_rows or form.integers]
DIM, FFN, KV = 256, 512, 128
SIZES = {
    "embedding_length": DIM,
    "feed_forward_length": FFN,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "block_count": 2,
}


def matrices(name: str) -> dict[str, NDArray[np.uint8]]:
    """Blocks of the type [rows, bytes] by the names of a Llama's matrices; the
    embedding makes logits.
    """
    shapes = {"token_embd": (len(metadata("llama")["tokenizer.ggml.tokens"]), DIM)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_{part}": (rows, DIM)
            for part, rows in (("q", DIM), ("k", KV), ("v", KV), ("output", DIM))
        }
        shapes |= {
            f"blk.{i}.ffn_gate": (FFN, DIM),
            f"blk.{i}.ffn_up": (FFN, DIM),
            f"blk.{i}.ffn_down": (DIM, FFN),
        }
    found = {}
    for seed, (tensor, (rows, cols)) in enumerate(shapes.items()):
        stored = random_stored(name, rows, cols, seed, scale=3 * cols**-0.5)
        found[f"{tensor}.weight"] = stored.parts["codes"].reshape(rows, -1)
    return found


def write(
    path: Path, name: str, *, as_floats: bool = False, scale: float | None = None
) -> Checkpoint:
    """Write the model in the type, or in float32 with gguf-py's values; `scale` begins
    a block of each.
    """
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (
        metadata("llama") | {f"llama.{key}": value for key, value in SIZES.items()}
    ).items():
        if key != "general.architecture":
            writer.add_key_value(key, value, value_type(value), *element_type(value))
    kind = gguf.GGMLQuantizationType[name]
    for tensor, blocks in matrices(name).items():
        if scale is not None:
            blocks[-1, :2] = np.array([scale], np.float16).view(np.uint8)
        if as_floats:
            writer.add_tensor(tensor, gguf.quants.dequantize(blocks, kind))
        else:
            writer.add_tensor(tensor, blocks, raw_dtype=kind)
    for tensor in (
        "output_norm",
        *(f"blk.{i}.{part}_norm" for i in range(2) for part in ("attn", "ffn")),
    ):
        writer.add_tensor(f"{tensor}.weight", np.ones(DIM, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path)


@pytest.mark.parametrize("name", TYPES)
def test_models_of_gguf_types(name: str, tmp_path: Path) -> None:
    """The reference gives the bits of the float32 model; cpu is near, for every
    chunking of the prompt.
    """
    checkpoint, floats = (
        write(tmp_path / f"{as_floats}.gguf", name, as_floats=as_floats)
        for as_floats in (False, True)
    )
    assert checkpoint.tensors["layers.1.q"].format == FORMATS[name]
    assert set(floats.tensors) == set(checkpoint.tensors)
    for tensor, stored in checkpoint.tensors.items():
        np.testing.assert_array_equal(stored.dequantise(), floats.tensors[tensor].dequantise())
    truth, executable = backends(checkpoint, "")
    exact, got = logits_of(truth, [TOKENS]), logits_of(executable, [TOKENS])
    assert np.array_equal(exact, logits_of(backends(floats, "")[0], [TOKENS]))
    near = 1e-5 if FORMATS[name].needs_floats else 0.03
    assert np.linalg.norm(got - exact) < near * np.linalg.norm(exact)
    assert np.array_equal(got, logits_of(executable, [17, 1, 1, TOKENS - 19]))


@pytest.mark.parametrize("name", ["IQ4_XS", "IQ2_S"])
@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_spoils_the_logits(
    name: str, scale: float, tmp_path: Path
) -> None:
    """The file is accepted, and logits are not finite, as with other types."""
    for executable in backends(write(tmp_path / "spoilt.gguf", name, scale=scale), ""):
        with np.errstate(invalid="ignore"):
            assert not np.isfinite(logits_of(executable, [TOKENS])).any()
