from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.checkpoint.files import map_file
from headrace.quant.dequantise import Floats, Parts, Rows
from headrace.quant.formats import FORMATS, Format, StoredTensor, TensorPart

HALVES = {  # where a block keeps its float16 scales
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), (0,)),  # noqa: E501
}  # fmt: skip
ZEROS_WITH_ANOTHER_SIGN = ("TQ1_0", "TQ2_0", "NVFP4")


GGML = [name for name, stored in FORMATS.items() if len(stored.parts) == 1]


def random_bytes(name: str, blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random bytes with normal numbers for scales (a random float16 is often infinite
    or NaN).
    """
    rng = np.random.default_rng(seed)
    stored = FORMATS[name]
    if name in ("F32", "F16", "BF16"):
        values = rng.normal(size=blocks).astype(np.float32)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float32 if name == "F32" else np.float16).view(np.uint8)
    data = rng.integers(0, 256, (blocks, stored.nbytes), dtype=np.uint8)
    if name == "MXFP4":
        data[:, 0] %= 251  # a larger power overflows
    if name == "IQ1_M":
        data[:, 55] &= 0xBF  # its float16 lies in pieces: this bit is the highest of the exponent
    for at in HALVES.get(name, ()):
        data[:, at : at + 2] = rng.normal(size=(blocks, 1)).astype(np.float16).view(np.uint8)
    return data.reshape(-1)


def oracle(name: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    kind = gguf.GGMLQuantizationType[name]
    values: NDArray[np.float32] = gguf.quants.dequantize(data.reshape(1, -1), kind)
    return values.reshape(-1)


def test_block_sizes_are_those_of_ggml() -> None:
    for name in GGML:
        stored = FORMATS[name]
        assert (stored.block, stored.nbytes) == gguf.GGML_QUANT_SIZES[
            gguf.GGMLQuantizationType[name]
        ]


@pytest.mark.parametrize("name", GGML)
@pytest.mark.parametrize("blocks", [1, 7, 3000])
def test_values_are_bit_equal_to_ggml(name: str, blocks: int) -> None:
    data = random_bytes(name, blocks)
    cols = blocks * FORMATS[name].block
    ours = StoredTensor.from_bytes("x", FORMATS[name], (1, cols), data).dequantise()
    assert ours.shape == (1, cols)
    if name in ZEROS_WITH_ANOTHER_SIGN:
        ours += np.float32(0)
        np.testing.assert_array_equal(
            ours.reshape(-1).view(np.uint32), (oracle(name, data) + np.float32(0)).view(np.uint32)
        )
        return
    np.testing.assert_array_equal(
        ours.reshape(-1).view(np.uint32), oracle(name, data).view(np.uint32)
    )


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_by_gguf_py(name: str) -> None:
    weights = np.random.default_rng(1).normal(size=(6, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    tensor = StoredTensor.from_bytes(
        "x", FORMATS[name], weights.shape, packed.view(np.uint8).reshape(-1)
    )
    np.testing.assert_array_equal(
        tensor.dequantise(), oracle(name, packed.view(np.uint8)).reshape(weights.shape)
    )
    assert np.abs(tensor.dequantise() - weights).max() < 0.4


@pytest.mark.parametrize(
    "name", ["F16", "Q4_1", "Q6_K", "IQ1_M", "IQ3_S", "IQ4_NL", "TQ2_0", "NVFP4"]
)
def test_dequantise_rows(name: str) -> None:
    stored = FORMATS[name]
    plain = StoredTensor.from_bytes(
        "x", stored, (10, 512), random_bytes(name, 10 * 512 // stored.block)
    )
    assert (plain.rows, plain.cols, plain.nbytes) == (
        10,
        512,
        10 * 512 // stored.block * stored.nbytes,
    )
    order = np.random.default_rng(2).permutation(10)
    permuted = plain.take("x", order)
    np.testing.assert_array_equal(permuted.dequantise(), plain.dequantise()[order])
    np.testing.assert_array_equal(
        permuted.dequantise_rows([3, 3, 0]), permuted.dequantise()[[3, 3, 0]]
    )
    np.testing.assert_array_equal(
        plain.dequantise_rows(np.array([9, 1])), plain.dequantise()[[9, 1]]
    )


def test_mxfp4_pairs() -> None:
    """The layout of gpt-oss: neighbours in a byte instead of ggml's halves of a block,
    and powers in another tensor.
    """
    rng = np.random.default_rng(0)
    codes, powers = (
        rng.integers(0, 16, (5, 3, 32), dtype=np.uint8),
        rng.integers(0, 251, (5, 3), dtype=np.uint8),
    )
    pairs = codes[:, :, ::2] | (codes[:, :, 1::2] << np.uint8(4))
    halves = np.concatenate(
        [powers[:, :, None], codes[:, :, :16] | (codes[:, :, 16:] << np.uint8(4))], axis=2
    )
    tensor = StoredTensor.from_bytes(
        "x", FORMATS["MXFP4_PAIRS"], (5, 96), pairs.reshape(-1), block_scales=powers
    )
    np.testing.assert_array_equal(
        tensor.dequantise().reshape(-1), oracle("MXFP4", halves.reshape(-1))
    )
    assert tensor.nbytes == 5 * 3 * 17 and tensor.take("x", np.arange(1, 3)).nbytes == 2 * 3 * 17
    order = np.array([4, 0, 3])
    np.testing.assert_array_equal(tensor.take("x", order).dequantise(), tensor.dequantise()[order])


def test_int8_by_row() -> None:
    """The layout of int-quantized checkpoints."""
    rng = np.random.default_rng(3)
    codes, scales = (
        rng.integers(-128, 128, (10, 70), np.int8),
        rng.normal(size=10).astype(np.float32),
    )
    plain = StoredTensor.from_bytes(
        "x", FORMATS["I8_ROW"], (10, 70), codes.view(np.uint8).reshape(-1), row_scales=scales
    )
    assert plain.nbytes == 10 * 70 + 10 * 4
    want = codes.astype(np.float32) * scales[:, None]
    np.testing.assert_array_equal(plain.dequantise(), want)
    order = rng.permutation(10)
    permuted = plain.take("x", order)
    np.testing.assert_array_equal(permuted.dequantise(), want[order])
    np.testing.assert_array_equal(permuted.dequantise_rows([3, 3, 0]), want[order][[3, 3, 0]])


def test_one_dimension_is_one_row() -> None:
    bias = StoredTensor.from_floats("b", np.arange(5, dtype=np.float32))
    assert (bias.rows, bias.cols) == (1, 5)
    np.testing.assert_array_equal(bias.dequantise(), np.arange(5))


def test_unaligned_data() -> None:
    data = np.zeros(4 * 6 + 1, np.uint8)[1:]
    data[:] = np.arange(6, dtype=np.float32).view(np.uint8)
    np.testing.assert_array_equal(
        StoredTensor.from_bytes("x", FORMATS["F32"], (2, 3), data).dequantise(),
        np.arange(6).reshape(2, 3),
    )


def test_a_released_tensor_reads_the_same_again(tmp_path: Path) -> None:
    """Whole pages of a mapped file are given back; other arrays stay."""
    data = random_bytes("Q8_0", 1024)
    (tmp_path / "tensor").write_bytes(b"head" + data.tobytes() + b"tail")
    mapped = np.frombuffer(map_file(tmp_path / "tensor"), np.uint8)[4:-4]
    for view in (mapped, data):
        tensor = StoredTensor.from_bytes("t", FORMATS["Q8_0"], (32, 1024), view)
        before = tensor.dequantise()
        tensor.release()
        assert np.array_equal(tensor.dequantise(), before)


def grouped_values(parts: Parts, rows: Rows) -> Floats:
    """Codes of 4 columns in 4 bytes, a scale for each row and group, and the group of
    each column, as in GPTQ.
    """
    codes = parts["codes"][rows]
    codes = codes.reshape(len(codes), -1).astype(np.float32)
    return codes * parts["group_scales"][rows][:, parts["group_of_column"]].astype(np.float32)


class TestParts:
    GROUPED = Format(
        name="GROUPED",
        block=4,
        nbytes=4,
        values=grouped_values,
        parts={
            "codes": TensorPart("u1"),
            "group_scales": TensorPart("f2"),
            "group_of_column": TensorPart("i4", by_row=False),
        },
    )

    def tensor(self) -> tuple[StoredTensor, NDArray[np.float32]]:
        """Ten rows of 8 columns in 3 groups, which the file has in reverse order."""
        rng = np.random.default_rng(4)
        codes, scales = (
            rng.integers(0, 256, (8, 10), np.uint8),
            rng.normal(size=(3, 10)).astype(np.float16),
        )
        group = np.array([2, 0, 1, 1, 0, 2, 2, 0], np.int32)
        parts = {
            "codes": codes.reshape(2, 4, 10).transpose(2, 0, 1),
            "group_scales": scales.T,
            "group_of_column": group,
        }
        return StoredTensor("x", self.GROUPED, (10, 8), parts), codes.T.astype(
            np.float32
        ) * scales.T[:, group].astype(np.float32)

    def test_values_come_from_all_parts(self) -> None:
        tensor, want = self.tensor()
        assert tensor.format.quantised
        assert tensor.nbytes == 80 + 60 + 32
        np.testing.assert_array_equal(tensor.dequantise(), want)
        np.testing.assert_array_equal(tensor.dequantise_rows([7, 0, 7]), want[[7, 0, 7]])
        tensor.release()
        np.testing.assert_array_equal(tensor.dequantise(), want)

    @pytest.mark.parametrize("rows", [range(3, 7), [6, 3, 5, 4], [9, 0, 4], range(10)])
    def test_rows_of_a_tensor(self, rows: list[int]) -> None:
        tensor, want = self.tensor()
        index = np.array(rows)
        taken = tensor.take("y", index)
        assert (taken.name, taken.shape) == ("y", (len(index), 8))
        assert taken.nbytes == len(index) * (8 + 6) + 32
        np.testing.assert_array_equal(taken.dequantise(), want[index])
        np.testing.assert_array_equal(taken.dequantise_rows([1, 1, 0]), want[index[[1, 1, 0]]])
        assert np.shares_memory(taken.parts["codes"], tensor.parts["codes"])

    @pytest.mark.parametrize("rows", [range(3, 7), [6, 3, 5, 4], [9, 0, 4], range(10)])
    def test_rows_that_lie_together_are_cut_out(self, rows: list[int]) -> None:
        rng = np.random.default_rng(5)
        scales = rng.normal(size=10).astype(np.float32)
        whole = StoredTensor.from_bytes(
            "x", FORMATS["I8_ROW"], (10, 6), rng.integers(0, 256, 60, np.uint8), row_scales=scales
        )
        taken = whole.take("y", np.array(rows))
        np.testing.assert_array_equal(taken.dequantise(), whole.dequantise()[np.array(rows)])
        assert taken.nbytes == len(rows) * 10
        assert (
            [len(part) for part in taken.parts.values()] == [10, 10]
            if len(rows) == 3
            else [len(rows)] * 2
        )
        assert (taken.row_order is None) == (list(rows) == sorted(rows) and len(rows) > 3)

    def test_a_transposed_matrix_is_a_view(self) -> None:
        """GPT-2 stores its weights as [columns, rows]."""
        values = np.random.default_rng(6).normal(size=(5, 7)).astype(np.float32)
        stored = StoredTensor.from_floats("x", values)
        tensor = StoredTensor(
            "y", stored.format, (7, 5), {"codes": stored.parts["codes"].transpose(1, 0, 2)}
        )
        np.testing.assert_array_equal(tensor.dequantise(), values.T)
        np.testing.assert_array_equal(tensor.dequantise_rows([4, 2]), values.T[[4, 2]])

    def test_parts_are_those_of_the_format(self) -> None:
        tensor, _ = self.tensor()
        codes = tensor.parts["codes"]
        for parts in (
            {"codes": codes},
            {**tensor.parts, "more": codes},
            {**tensor.parts, "group_scales": codes},
        ):
            with pytest.raises(AssertionError, match="x: "):
                StoredTensor("x", self.GROUPED, (10, 8), parts)
