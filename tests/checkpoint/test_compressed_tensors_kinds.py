"""Every kind of compressed-tensors weight, packed from the description, read and computed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.formats import StoredTensor
from tests.folders import assembled, check_engine, tiny_llama, write_folder

Array = NDArray[Any]
Tensors = dict[str, torch.Tensor]
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
MANY = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def config(
    num_bits: int, kind: str = "pack-quantized", type: str = "int", **weights: Any
) -> dict[str, Any]:
    arguments = {
        "num_bits": num_bits,
        "type": type,
        "symmetric": True,
        "strategy": "group",
        "dynamic": False,
    } | weights
    groups = {"group_0": {"weights": arguments, "input_activations": None, "targets": ["Linear"]}}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": groups,
        "kv_cache_scheme": None,
    }


def words_of(codes: Array, bits: int) -> torch.Tensor:
    """Rows of codes as int32, bit after bit, padded with zeros."""
    rows, cols = codes.shape
    words = np.zeros((rows, -(-cols * bits // 32)), np.uint32)
    for i in range(cols * bits):
        words[:, i // 32] |= ((codes[:, i // bits].astype(np.uint32) >> i % bits) & 1) << np.uint32(
            i % 32
        )
    return torch.from_numpy(words.view(np.int32))


def packed(codes: Array, scale: torch.Tensor, bits: int, zeros: Array | None = None) -> Tensors:
    """The tensors of a layer x; codes and zero points from 0 to 2^bits - 1."""
    points = (
        {} if zeros is None else {"x.weight_zero_point": words_of(zeros.T, bits).T.contiguous()}
    )
    shape = torch.tensor(codes.shape)
    return {
        "x.weight_packed": words_of(codes, bits),
        "x.weight_scale": scale,
        "x.weight_shape": shape,
        **points,
    }


def groups_of(cols: int, data: st.DataObject) -> int:
    return data.draw(
        st.sampled_from([cols // group for group in (16, 32, 64, 128, cols) if cols % group == 0])
    )


def spread(numbers: Array, cols: int) -> Array:
    return np.repeat(numbers, cols // numbers.shape[1], axis=1)


def sole(found: Mapping[str, StoredTensor]) -> StoredTensor:
    assert found.keys() == {"x.weight"} and found["x.weight"].name == "x.weight"
    return found["x.weight"]


@MANY
@given(
    bits=st.integers(1, 8),
    rows=st.integers(1, 40),
    units=st.integers(1, 8),
    has_points=st.booleans(),
    dtype=DTYPES,
    data=st.data(),
)
def test_packed_integers(
    bits: int,
    rows: int,
    units: int,
    has_points: bool,
    dtype: torch.dtype,
    data: st.DataObject,
    tmp_path: Path,
) -> None:
    cols = 32 * units
    rng, groups = np.random.default_rng(rows * units), groups_of(cols, data)
    codes = rng.integers(0, 1 << bits, (rows, cols))
    zeros = rng.integers(0, 1 << bits, (rows, groups)) if has_points else None
    scale = torch.from_numpy(rng.standard_normal((rows, groups)).astype(np.float32)).to(dtype)
    weight = sole(
        assembled(
            tmp_path, config(bits, symmetric=not has_points), packed(codes, scale, bits, zeros)
        )
    )
    offset = np.full((rows, groups), 1 << bits - 1) if zeros is None else zeros
    want = (codes - spread(offset, cols)).astype(np.float32) * spread(scale.float().numpy(), cols)
    assert weight.shape == (rows, cols)
    assert np.array_equal(weight.dequantise(), want)
    some = rng.integers(0, rows, 5)
    assert np.array_equal(weight.take("y", some).dequantise(), want[some])


@MANY
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 70),
    bits=st.sampled_from([3, 4, 8]),
    by_tensor=st.booleans(),
)
def test_columns_that_fill_no_word(
    rows: int, cols: int, bits: int, by_tensor: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 1 << bits, (rows, cols))
    scale = torch.from_numpy(rng.standard_normal(1 if by_tensor else (rows, 1)).astype(np.float32))
    weight = sole(assembled(tmp_path, config(bits), packed(codes, scale, bits)))
    assert np.array_equal(
        weight.dequantise(),
        (codes - (1 << bits - 1)).astype(np.float32) * scale.numpy().reshape(-1, 1),
    )


@MANY
@given(
    rows=st.integers(1, 40),
    units=st.integers(1, 8),
    points=st.sampled_from(["none", "zero", "some", "one"]),
    data=st.data(),
)
def test_int8(rows: int, units: int, points: str, data: st.DataObject, tmp_path: Path) -> None:
    """Zero points of 0 equal a symmetric matrix."""
    cols, rng = 32 * units, np.random.default_rng(rows)
    groups = groups_of(cols, data)
    codes = rng.integers(-128, 128, (rows, cols)).astype(np.int8)
    scale = rng.standard_normal((rows, groups)).astype(np.float32)
    zeros = (
        np.zeros((rows, groups), np.int8)
        if points == "zero"
        else rng.integers(-128, 128, (rows, groups)).astype(np.int8)
    )
    zeros = np.array([7], np.int8) if points == "one" else zeros
    tensors = {
        "x.weight": torch.from_numpy(codes),
        "x.weight_scale": torch.from_numpy(scale),
        "x.input_scale": torch.ones(1),
    }
    if points != "none":
        tensors["x.weight_zero_point"] = torch.from_numpy(zeros)
    weight = sole(
        assembled(tmp_path, config(8, "int-quantized", symmetric=points == "none"), tensors)
    )
    offset = (
        0 if points == "none" else 7 if points == "one" else spread(zeros.astype(np.int16), cols)
    )
    assert np.array_equal(
        weight.dequantise(), (codes - np.int16(0) - offset).astype(np.float32) * spread(scale, cols)
    )
    assert (weight.format.name == "I8_ROW") == (groups == 1 and points in ("none", "zero"))


@pytest.mark.parametrize("structure", [[128, 128], [1, 32], [64, 32]])
def test_int8_of_blocks(structure: list[int], tmp_path: Path) -> None:
    rng, (high, wide) = np.random.default_rng(1), structure
    codes = rng.integers(-128, 128, (200, 160)).astype(np.int8)
    scale = rng.standard_normal((-(-200 // high), -(-160 // wide))).astype(np.float32)
    zeros = rng.integers(-128, 128, scale.shape).astype(np.int8)
    parts = {"x.weight": codes, "x.weight_scale": scale, "x.weight_zero_point": zeros}
    blocks = config(
        8, "int-quantized", strategy="block", block_structure=structure, symmetric=False
    )
    weight = sole(
        assembled(tmp_path, blocks, {name: torch.from_numpy(part) for name, part in parts.items()})
    )
    by_number = [
        np.repeat(np.repeat(numbers, high, axis=0), wide, axis=1)[:200, :160]
        for numbers in (zeros.astype(np.int16), scale)
    ]
    assert np.array_equal(
        weight.dequantise(), (codes - by_number[0]).astype(np.float32) * by_number[1]
    )


@MANY
@given(
    rows=st.integers(1, 300),
    units=st.integers(1, 9),
    strategy=st.sampled_from(["tensor", "channel", "group", "block"]),
    dtype=DTYPES,
)
def test_float8(rows: int, units: int, strategy: str, dtype: torch.dtype, tmp_path: Path) -> None:
    cols, rng = 32 * units, np.random.default_rng(rows)
    shape = {
        "tensor": (1,),
        "channel": (rows, 1),
        "group": (rows, units),
        "block": (-(-rows // 128), -(-cols // 64)),
    }[strategy]
    values = torch.from_numpy(rng.standard_normal((rows, cols)) * 100).to(torch.float8_e4m3fn)
    scale = torch.from_numpy(rng.standard_normal(shape)).to(dtype)
    quantised = config(8, "float-quantized", "float", strategy=strategy, block_structure=[128, 64])
    weight = sole(
        assembled(
            tmp_path,
            quantised,
            {"x.weight": values, "x.weight_scale": scale, "x.input_scale": torch.ones(1)},
        )
    )
    by_number = (
        scale.float().numpy().reshape(1, 1) if strategy == "tensor" else scale.float().numpy()
    )
    by_row = np.repeat(by_number, 128 if strategy == "block" else 1, axis=0)[:rows]
    by_column = np.repeat(
        by_row, {"tensor": cols, "channel": cols, "group": 32, "block": 64}[strategy], axis=1
    )[:, :cols]
    assert np.array_equal(weight.dequantise(), values.float().numpy() * by_column)


def fours(codes: Array) -> torch.Tensor:
    return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


@MANY
@given(
    rows=st.integers(1, 20),
    units=st.integers(1, 6),
    kind=st.sampled_from(["mxfp4", "nvfp4", "mxfp8"]),
)
def test_small_floats_with_small_scales(rows: int, units: int, kind: str, tmp_path: Path) -> None:
    rng, cols = np.random.default_rng(rows), 32 * units
    codes, powers = (
        rng.integers(0, 16, (rows, cols)),
        rng.integers(100, 140, (rows, units)).astype(np.uint8),
    )
    scale = np.ldexp(np.float32(1), powers.astype(int) - 127)
    if kind == "mxfp8":
        values = torch.from_numpy(rng.standard_normal((rows, cols))).to(torch.float8_e4m3fn)
        tensors = {"x.weight": values, "x.weight_scale": torch.from_numpy(powers)}
        want = values.float().numpy() * spread(scale, cols)
    elif kind == "mxfp4":
        tensors = {"x.weight_packed": fours(codes), "x.weight_scale": torch.from_numpy(powers)}
        want = E2M1[codes] * spread(scale, cols)
    else:
        small = torch.from_numpy(rng.standard_normal((rows, 2 * units))).to(torch.float8_e4m3fn)
        tensors = {
            "x.weight_packed": fours(codes),
            "x.weight_scale": small,
            "x.weight_global_scale": torch.tensor([384.0]),
        }
        want = E2M1[codes] * spread(small.float().numpy() / np.float32(384), cols)
        tensors["x.input_global_scale"] = torch.ones(1)
    bits, suffix = (8, "quantized") if kind == "mxfp8" else (4, "pack-quantized")
    weight = sole(assembled(tmp_path, config(bits, f"{kind}-{suffix}", "float"), tensors))
    assert np.array_equal(weight.dequantise(), want)


def quantise(
    bits: int, groups: int, has_points: bool, weight: torch.Tensor
) -> tuple[torch.Tensor, Tensors]:
    by_group = weight.numpy().reshape(len(weight), groups, -1)
    low, high = by_group.min(axis=2), by_group.max(axis=2)
    if not has_points:
        high = np.maximum(high, -low)
        low = -high
    scale = (high - low) / ((1 << bits) - 1)
    zeros = (
        np.clip(np.rint(-low / scale), 0, (1 << bits) - 1)
        if has_points
        else np.full_like(low, 1 << bits - 1)
    )
    codes = np.clip(np.rint(by_group / scale[:, :, None]) + zeros[:, :, None], 0, (1 << bits) - 1)
    values = (codes - zeros[:, :, None]) * scale[:, :, None]
    tensors = packed(
        codes.reshape(weight.shape).astype(int),
        torch.from_numpy(scale),
        bits,
        zeros.astype(int) if has_points else None,
    )
    return torch.from_numpy(values.reshape(weight.shape)), tensors


@pytest.mark.parametrize(
    ("bits", "groups", "has_points"), [(4, 2, False), (4, 2, True), (8, 1, False), (3, 4, True)]
)
def test_the_engine_computes_packed_integers(
    bits: int, groups: int, has_points: bool, tmp_path: Path
) -> None:
    def stored(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        values, tensors = quantise(bits, groups, has_points, weight)
        return values, {part.replace("x.weight", name): tensor for part, tensor in tensors.items()}

    model = tiny_llama(64, 128)
    write_folder(tmp_path, model, config(bits, symmetric=not has_points), stored)
    checkpoint = check_engine(tmp_path, model)
    assert {checkpoint.tensors[f"layers.0.{part}"].format.spec.bits for part in ("q", "down")} == {
        bits
    }


@pytest.mark.parametrize("scheme", ["float8", "mxfp4"])
def test_the_engine_computes_small_floats(scheme: str, tmp_path: Path) -> None:
    def stored(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        if scheme == "float8":
            scale = weight.abs().amax() / 448
            values = (weight / scale).to(torch.float8_e4m3fn)
            return values.float() * scale, {
                name: values,
                f"{name}_scale": scale,
                name.replace("weight", "input_scale"): 2 * scale,
            }
        by_group = weight.numpy().reshape(len(weight), -1, 32)
        powers = np.floor(np.log2(np.abs(by_group).max(axis=2))) - 2
        units = by_group / np.exp2(powers)[:, :, None]
        codes = np.abs(units[..., None] - E2M1).argmin(axis=-1).reshape(weight.shape)
        values = torch.from_numpy(E2M1[codes] * spread(np.exp2(powers), weight.shape[1]))
        return values, {
            f"{name}_packed": fours(codes),
            f"{name}_scale": torch.from_numpy((powers + 127).astype(np.uint8)),
        }

    model = tiny_llama(64, 128)
    kind = (
        config(8, "float-quantized", "float")
        if scheme == "float8"
        else config(4, "mxfp4-pack-quantized", "float")
    )
    write_folder(tmp_path, model, kind, stored)
    check_engine(tmp_path, model)


class TestMalformed:
    TENSORS = packed(np.ones((8, 64), int), torch.ones(8, 2), 4, np.ones((8, 2), int))
    FOURS = (
        torch.zeros(8, 32, dtype=torch.uint8),
        torch.ones(8, 4).to(torch.float8_e4m3fn),
        torch.ones(1),
    )

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"x.weight_scale": None}, FormatError, r"x\.weight_scale is missing"),
            ({"x.weight_shape": None}, FormatError, r"x\.weight_shape is missing"),
            (
                {"x.weight_shape": torch.tensor([8, 64, 1])},
                FormatError,
                r"x\.weight_shape are not int32 .* and int64 \[2\]",
            ),
            (
                {"x.weight_shape": torch.tensor([8, 72])},
                FormatError,
                r"x\.weight_packed has shape \[8, 8\].*\[8, 72\] in codes of 4 bits",
            ),
            ({"x.weight_shape": torch.tensor([8, -1])}, FormatError, r"x\.weight_packed has shape"),
            (
                {"x.weight_packed": torch.ones(8, 8)},
                FormatError,
                r"x\.weight_packed and .* are not int32",
            ),
            (
                {"x.weight_scale": torch.ones(8, 3)},
                FormatError,
                r"x\.weight_scale has shape \[8, 3\]",
            ),
            (
                {"x.weight_scale": torch.ones(8, 2, dtype=torch.int32)},
                FormatError,
                r"x\.weight_scale is I32",
            ),
            (
                {"x.weight_scale": torch.full((8, 2), torch.nan, dtype=torch.bfloat16)},
                FormatError,
                r"x\.weight_scale .* not finite",
            ),
            (
                {"x.weight_scale": torch.ones(8, 8)},
                UnsupportedModelError,
                r"x\.weight_scale has scales of 8 columns",
            ),
            (
                {"x.weight_zero_point": torch.ones(8, 2, dtype=torch.int32)},
                FormatError,
                r"x\.weight_zero_point is I32 \[8, 2\]",
            ),
            (
                {"x.weight_zero_point": torch.full((8, 2), 8, dtype=torch.int8)},
                FormatError,
                r"zero point that is not a code of 4 bits",
            ),
            (
                {"x.weight_g_idx": torch.arange(64, dtype=torch.int32) % 2},
                UnsupportedModelError,
                r"x\.weight_g_idx .*actorder",
            ),
        ],
    )
    def test_packed(
        self,
        tmp_path: Path,
        change: dict[str, torch.Tensor | None],
        error: type[Exception],
        message: str,
    ) -> None:
        tensors = {
            name: tensor for name, tensor in (self.TENSORS | change).items() if tensor is not None
        }
        with pytest.raises(error, match=message):
            assembled(tmp_path, config(4), tensors)

    @pytest.mark.parametrize(
        "order",
        [torch.arange(64, dtype=torch.int32) // 32, torch.full((64,), -1, dtype=torch.int32)],
    )
    def test_an_order_that_changes_nothing(self, tmp_path: Path, order: torch.Tensor) -> None:
        sole(
            assembled(
                tmp_path, config(4, actorder="group"), self.TENSORS | {"x.weight_g_idx": order}
            )
        )

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({1: torch.zeros(8, 4)}, FormatError, r"x\.weight_packed .* scales of type F32"),
            (
                {1: torch.full((8, 2), 255, dtype=torch.uint8)},
                FormatError,
                r"x\.weight_scale .* NaN",
            ),
            (
                {1: torch.full((8, 1), 7, dtype=torch.uint8)},
                UnsupportedModelError,
                r"x\.weight_scale has scales of 64 columns",
            ),
            (
                {1: torch.full((8, 4), torch.nan).to(torch.float8_e4m3fn)},
                FormatError,
                r"x\.weight_scale divided by .* is not finite",
            ),
            ({2: torch.zeros(1)}, FormatError, r"x\.weight_global_scale.* is not finite"),
            (
                {2: torch.ones(2, 1)},
                FormatError,
                r"x\.weight_global_scale, which must be one number",
            ),
            ({2: None}, FormatError, r"x\.weight_global_scale is missing"),
        ],
    )
    def test_fours(
        self,
        tmp_path: Path,
        change: dict[int, torch.Tensor | None],
        error: type[Exception],
        message: str,
    ) -> None:
        names = ("x.weight_packed", "x.weight_scale", "x.weight_global_scale")
        tensors = {name: change.get(i, self.FOURS[i]) for i, name in enumerate(names)}
        with pytest.raises(error, match=message):
            assembled(
                tmp_path,
                config(4, "nvfp4-pack-quantized", "float"),
                {name: tensor for name, tensor in tensors.items() if tensor is not None},
            )
