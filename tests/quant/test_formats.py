from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.checkpoint.files import map_file
from headrace.quant.formats import FORMATS, StoredTensor

HALVES = {  # where a block keeps its float16 scales
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


GGML = [name for name, stored in FORMATS.items() if not stored.row_scales]


def random_bytes(name: str, blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    """Any bytes, with scales that are ordinary numbers (a random float16 is often infinite or NaN)."""
    rng = np.random.default_rng(seed)
    stored = FORMATS[name]
    if name in ("F32", "F16", "BF16"):
        values = rng.normal(size=blocks).astype(np.float32)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float32 if name == "F32" else np.float16).view(np.uint8)
    data = rng.integers(0, 256, (blocks, stored.nbytes), dtype=np.uint8)
    for at in HALVES[name]:
        data[:, at : at + 2] = rng.normal(size=(blocks, 1)).astype(np.float16).view(np.uint8)
    return data.reshape(-1)


def oracle(name: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    kind = gguf.GGMLQuantizationType[name]
    values: NDArray[np.float32] = gguf.quants.dequantize(data.reshape(1, -1), kind)
    return values.reshape(-1)


def test_block_sizes_are_those_of_ggml() -> None:
    for name in GGML:
        stored = FORMATS[name]
        assert (stored.block, stored.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


@pytest.mark.parametrize("name", GGML)
@pytest.mark.parametrize("blocks", [1, 7, 3000])
def test_values_are_bit_equal_to_ggml(name: str, blocks: int) -> None:
    data = random_bytes(name, blocks)
    cols = blocks * FORMATS[name].block
    ours = StoredTensor("x", FORMATS[name], (1, cols), data).dequantise()
    assert ours.shape == (1, cols)
    np.testing.assert_array_equal(ours.reshape(-1).view(np.uint32), oracle(name, data).view(np.uint32))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_gguf_quantises_comes_back(name: str) -> None:
    weights = np.random.default_rng(1).normal(size=(6, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    tensor = StoredTensor("x", FORMATS[name], weights.shape, packed.view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(tensor.dequantise(), oracle(name, packed.view(np.uint8)).reshape(weights.shape))
    assert np.abs(tensor.dequantise() - weights).max() < 0.4


@pytest.mark.parametrize("name", ["F16", "Q4_1", "Q6_K"])
def test_rows(name: str) -> None:
    stored = FORMATS[name]
    plain = StoredTensor("x", stored, (10, 512), random_bytes(name, 10 * 512 // stored.block))
    assert (plain.rows, plain.cols, plain.nbytes) == (10, 512, 10 * 512 // stored.block * stored.nbytes)
    order = np.random.default_rng(2).permutation(10)
    permuted = StoredTensor("x", stored, (10, 512), plain.data, order)
    np.testing.assert_array_equal(permuted.dequantise(), plain.dequantise()[order])
    np.testing.assert_array_equal(permuted.dequantise_rows([3, 3, 0]), permuted.dequantise()[[3, 3, 0]])
    np.testing.assert_array_equal(plain.dequantise_rows(np.array([9, 1])), plain.dequantise()[[9, 1]])


def test_a_scale_for_each_row() -> None:
    """The layout of int-quantized checkpoints: codes, and beside them a factor for each row of them."""
    rng = np.random.default_rng(3)
    codes, scales = rng.integers(-128, 128, (10, 70), np.int8), rng.normal(size=10).astype(np.float32)
    plain = StoredTensor("x", FORMATS["I8_ROW"], (10, 70), codes.view(np.uint8).reshape(-1), row_scales=scales)
    assert plain.nbytes == 10 * 70 + 10 * 4
    want = codes.astype(np.float32) * scales[:, None]
    np.testing.assert_array_equal(plain.dequantise(), want)
    order = rng.permutation(10)
    permuted = StoredTensor("x", plain.format, plain.shape, plain.data, order, scales)
    np.testing.assert_array_equal(permuted.dequantise(), want[order])
    np.testing.assert_array_equal(permuted.dequantise_rows([3, 3, 0]), want[order][[3, 3, 0]])


def test_one_dimension_is_one_row() -> None:
    bias = StoredTensor("b", FORMATS["F32"], (5,), np.arange(5, dtype=np.float32).view(np.uint8))
    assert (bias.rows, bias.cols) == (1, 5)
    np.testing.assert_array_equal(bias.dequantise(), np.arange(5))


def test_unaligned_data() -> None:
    data = np.zeros(4 * 6 + 1, np.uint8)[1:]
    data[:] = np.arange(6, dtype=np.float32).view(np.uint8)
    np.testing.assert_array_equal(StoredTensor("x", FORMATS["F32"], (2, 3), data).dequantise(), np.arange(6).reshape(2, 3))


def test_a_released_tensor_reads_the_same_again(tmp_path: Path) -> None:
    """Of a mapped file whole pages are given back; numbers of our own making stay where they are."""
    data = random_bytes("Q8_0", 1024)
    (tmp_path / "tensor").write_bytes(b"head" + data.tobytes() + b"tail")
    mapped = np.frombuffer(map_file(tmp_path / "tensor"), np.uint8)[4:-4]
    for view in (mapped, data):
        tensor = StoredTensor("t", FORMATS["Q8_0"], (32, 1024), view)
        before = tensor.dequantise()
        tensor.release()
        assert np.array_equal(tensor.dequantise(), before)
