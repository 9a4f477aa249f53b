"""torchao files written from the description, read and computed."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from headrace.checkpoint.folder import open_folder
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.quantisation import method_of
from headrace.checkpoint.safetensors import read_safetensors
from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.formats import StoredTensor
from tests.folders import check_engine, configure, tiny_llama
from tests.quantised import write

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
NAME = "model.layers.1.self_attn.q_proj"


def config_of(kind: str, **data: Any) -> dict[str, Any]:
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}},
    }


def intx(bits: int) -> dict[str, Any]:
    packing = {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"}
    return config_of(
        "IntxWeightOnlyConfig",
        weight_dtype={"_type": "torch.dtype", "_data": f"int{bits}"},
        intx_packing_format=packing,
    )


INT8 = config_of("Int8WeightOnlyConfig", group_size=None)
INT4 = config_of(
    "Int4WeightOnlyConfig",
    group_size=32,
    int4_packing_format={"_type": "Int4PackingFormat", "_data": "PLAIN"},
)


def parts_of(
    codes: NDArray[Any], scales: torch.Tensor, zeros: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    parts = {"_weight_qdata": torch.from_numpy(codes.astype(np.int8)), "_weight_scale": scales}
    return parts if zeros is None else parts | {"_weight_zero_point": zeros}


def pairs(codes: NDArray[Any]) -> NDArray[Any]:
    """Two codes from -8 to 7 in a byte, the first in the low half."""
    return (codes[:, ::2] % 16 + codes[:, 1::2] % 16 * 16).astype(np.uint8).view(np.int8)


def read(parts: dict[str, torch.Tensor], config: dict[str, Any]) -> StoredTensor:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({f"x.{name}": part.contiguous() for name, part in parts.items()}, path)
        return method_of(config).assemble(config, read_safetensors(path), "here")["x.weight"]


def check(tensor: StoredTensor, want: NDArray[np.float32], rng: np.random.Generator) -> None:
    assert tensor.shape == want.shape and not tensor.parts["codes"].flags.owndata
    assert np.array_equal(tensor.dequantise(), want)
    some = rng.integers(0, len(want), 5)
    assert np.array_equal(tensor.dequantise_rows(some), want[some])
    assert np.array_equal(tensor.take("some", np.arange(1, len(want))).dequantise(), want[1:])


@settings(max_examples=80, deadline=None)
@given(
    bits=st.integers(1, 8),
    group=st.sampled_from([0, -1, 16, 32, 64]),
    count=st.integers(1, 3),
    rows=st.integers(2, 40),
    zero=st.sampled_from(["absent", "none", "some"]),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 2**32),
)
def test_values_of_one_code_a_byte_are_exact(
    bits: int, group: int, count: int, rows: int, zero: str, dtype: str, seed: int
) -> None:
    """A group size of -1 is a row, 0 is the tensor."""
    rng, cols, half = np.random.default_rng(seed), 64 * count, 1 << bits - 1
    shape = (1, 1) if group == 0 else (rows, 1 if group == -1 else cols // group)
    codes = rng.integers(-half, half, (rows, cols))
    points = rng.integers(-half, half, shape) if zero == "some" else np.zeros(shape, int)
    scales = torch.from_numpy(rng.standard_normal(shape)).to(DTYPES[dtype])
    config = INT8 if bits == 8 and seed % 2 else intx(bits)
    tensor = read(
        parts_of(
            codes, scales, None if zero == "absent" else torch.from_numpy(points.astype(np.int8))
        ),
        config,
    )
    points, factors = (
        np.broadcast_to(np.repeat(found, cols // shape[1], axis=1), codes.shape)
        for found in (points, scales.float().numpy())
    )
    check(tensor, (codes - points).astype(np.float32) * factors, rng)
    assert tensor.format.spec and tensor.format.spec.bits == next(
        known for known in (2, 3, 4, 8) if known >= bits
    )


@settings(max_examples=60, deadline=None)
@given(
    group=st.sampled_from([16, 32, 64]),
    count=st.integers(1, 3),
    rows=st.integers(2, 40),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_values_of_two_codes_a_byte_are_exact(
    group: int, count: int, rows: int, symmetric: bool, seed: int
) -> None:
    """Scales have one size, so that sums in both orders are exact."""
    rng, cols = np.random.default_rng(seed), 64 * count
    shape = cols // group, rows
    codes = rng.integers(-8, 8, (rows, cols))
    scales, zeros = (torch.from_numpy(rng.uniform(1, 2, shape)).bfloat16() for _ in range(2))
    zeros *= 0 if symmetric else 1
    tensor = read(parts_of(pairs(codes), scales, zeros), INT4)
    factors, middles = (
        np.repeat(found.float().numpy().T, group, axis=1) for found in (scales, zeros)
    )
    check(tensor, codes.astype(np.float32) * factors + middles, rng)
    assert ("zeros" in tensor.parts) != symmetric


def quantise(bits: int, group: int, symmetric: bool) -> Any:
    def of(weight: NDArray[np.float32]) -> tuple[dict[str, torch.Tensor], NDArray[np.float32]]:
        blocks = weight.reshape(len(weight), -1, group)
        half = 1 << bits - 1
        low, high = blocks.min(axis=2), blocks.max(axis=2)
        size = np.maximum(-low, high) / (half - 0.5) if symmetric else (high - low) / (2 * half - 1)
        scales = torch.from_numpy(size).bfloat16()
        s = scales.float().numpy()
        zeros = (
            np.zeros(s.shape, int)
            if symmetric
            else np.clip(np.rint(-half - low / s), -half, half - 1).astype(int)
        )
        codes = np.clip(np.rint(blocks / s[..., None]) + zeros[..., None], -half, half - 1).astype(
            int
        )
        values = (
            ((codes - zeros[..., None]) * s[..., None]).reshape(weight.shape).astype(np.float32)
        )
        return parts_of(
            codes.reshape(weight.shape), scales, torch.from_numpy(zeros.astype(np.int8))
        ), values

    return of


def quantise_pairs(
    weight: NDArray[np.float32],
) -> tuple[dict[str, torch.Tensor], NDArray[np.float32]]:
    blocks = weight.reshape(len(weight), -1, 32)
    low = blocks.min(axis=2)
    scales = torch.from_numpy((blocks.max(axis=2) - low) / 15).bfloat16()
    s = scales.float().numpy()
    zeros = torch.from_numpy(low + 8 * s).bfloat16()
    z = zeros.float().numpy()
    codes = np.clip(np.rint((blocks - z[..., None]) / s[..., None]), -8, 7).astype(int)
    values = (codes * s[..., None] + z[..., None]).reshape(weight.shape).astype(np.float32)
    return parts_of(pairs(codes.reshape(weight.shape)), scales.T, zeros.T), values


@pytest.mark.parametrize(
    ("config", "of"),
    [
        (INT4, quantise_pairs),
        (INT8, quantise(8, 32, False)),
        (intx(4), quantise(4, 32, True)),
        (intx(5), quantise(5, 32, False)),
    ],
)
def test_a_folder_is_computed(tmp_path: Path, config: dict[str, Any], of: Any) -> None:
    check_engine(tmp_path, write(tmp_path, config, of))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("Float8WeightOnlyConfig"), "quant_type = Float8WeightOnlyConfig"),
        (config_of("FqnToConfig", fqn_to_config={}), "quant_type = FqnToConfig"),
        (
            {"quant_method": "torchao", "quant_type": "int4_weight_only"},
            "quant_type = int4_weight_only",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": [1], "_data": {}}}},
            "quant_type = ",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}},
            },
            "quant_type = ",
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": INT8["quant_type"]["default"] | {"_version": 1}},
            },
            r"quant_type\._version = 1",
        ),
        (
            config_of("Int4WeightOnlyConfig", int4_packing_format={"_data": "TILE_PACKED_TO_4D"}),
            r"quant_type\.int4_packing_format = TILE_PACKED_TO_4D",
        ),
        (
            config_of(
                "IntxWeightOnlyConfig", intx_packing_format={"_data": "OPAQUE_ATEN_KLEIDIAI"}
            ),
            r"quant_type\.intx_packing_format = OPAQUE_ATEN",
        ),
        (
            config_of("IntxWeightOnlyConfig", weight_dtype={"_data": "uint4"}),
            r"quant_type\.weight_dtype = uint4",
        ),
    ],
)
def test_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    configure(tmp_path, tiny_llama(64, 96), config)
    with pytest.raises(
        UnsupportedModelError, match=rf"quantization_config: {message}.*torchao with"
    ):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"_weight_scale": None}, FormatError, r"q_proj\._weight_scale is missing"),
        (
            {"_weight_qdata": torch.zeros(64, 64)},
            FormatError,
            r"q_proj\._weight_qdata is F32 \[64, 64\], expected I8",
        ),
        (
            {"_weight_scale": torch.ones(32, 2)},
            FormatError,
            r"q_proj\._weight_scale has shape \[32, 2\], expected \[64, 2\]",
        ),
        (
            {"_weight_scale": torch.ones(64, 1)},
            FormatError,
            r"q_proj\._weight_zero_point has shape \[64, 2\], expected \[64, 1\]",
        ),
        (
            {"_weight_scale": torch.full((64, 2), float("nan"))},
            FormatError,
            r"q_proj\._weight_scale has a number that is not finite",
        ),
        (
            {"_weight_zero_point": torch.zeros(64, 2)},
            FormatError,
            r"q_proj\._weight_zero_point is F32",
        ),
        (
            {"_weight_zero_point": torch.full((64, 2), 8, dtype=torch.int8)},
            FormatError,
            r"zero_point has a zero point outside int4",
        ),
        (
            {"_weight_zero_point": None, "_weight_scale": torch.ones(64, 3)},
            FormatError,
            r"_weight_scale has 3 scales per row, which do not divide its 64",
        ),
        (
            {"_weight_zero_point": None, "_weight_scale": torch.ones(64, 8)},
            UnsupportedModelError,
            r"_weight_scale has groups of 8 columns",
        ),
        (
            {"_weight_act_pre_scale": torch.ones(64)},
            UnsupportedModelError,
            r"q_proj\._weight_act_pre_scale scales activations",
        ),
    ],
)
def test_malformed(
    tmp_path: Path, change: dict[str, torch.Tensor | None], error: type[Exception], message: str
) -> None:
    write(tmp_path, intx(4), quantise(4, 32, False))
    path = tmp_path / "model.safetensors"
    state = load_file(path) | {f"{NAME}.{part}": tensor for part, tensor in change.items()}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"_weight_zero_point": torch.zeros(2, 32)},
            r"x\._weight_zero_point has shape \[2, 32\], expected \[2, 64\]",
        ),
        (
            {"_weight_scale": torch.ones(64, 2)},
            r"x\._weight_scale has shape \[64, 2\], expected \[64, 64\]",
        ),
        (
            {"_weight_zero_point": torch.full((2, 64), float("inf"))},
            r"x\._weight_zero_point has a number that is not finite",
        ),
    ],
)
def test_malformed_pairs(change: dict[str, torch.Tensor], message: str) -> None:
    parts = parts_of(np.zeros((64, 32), np.int8), torch.ones(2, 64), torch.ones(2, 64)) | change
    with pytest.raises(FormatError, match=message):
        read(parts, INT4)
