"""HQQ files packed from the description, read and computed."""

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

PARAMS = {
    "nbits": 4,
    "channel_wise": True,
    "group_size": 32,
    "optimize": True,
    "round_zero": True,
    "axis": 1,
    "view_as_float": False,
}
LAYERS = {
    "weight_quant_params": PARAMS,
    "scale_quant_params": None,
    "zero_quant_params": None,
    "offload_meta": False,
}
CONFIG: dict[str, Any] = {
    "quant_method": "hqq",
    "quant_config": LAYERS,
    "skip_modules": ["lm_head"],
}
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
PACKED = {
    8: ("8bit_u8", 1),
    4: ("4bit_u8", 2),
    3: ("3bit_32", 10),
    2: ("2bit_u8", 4),
    1: ("1bit_u8", 8),
}
NAME = "model.layers.1.self_attn.q_proj"


def text(value: str) -> torch.Tensor:
    return torch.tensor([ord(letter) for letter in value], dtype=torch.uint8)


def parts_of(
    codes: NDArray[Any], scales: torch.Tensor, zeros: torch.Tensor, bits: int
) -> dict[str, torch.Tensor]:
    """Pack codes [rows, cols], scales and zeros [rows, groups of a row]."""
    packing, shared = PACKED[bits]
    groups = codes.reshape(scales.numel(), -1).astype(np.uint64)
    filled = np.pad(groups, ((0, -len(groups) % shared), (0, 0)))
    packed = sum(
        run << np.uint64(bits * (shared - 1 - at))
        for at, run in enumerate(np.split(filled, shared))
    )
    flags = {
        name: torch.tensor(name in ("channel_wise", "round_zero"), dtype=torch.uint8)
        for name in FLAGS
    }
    integers = {"nbits": bits, "group_size": groups.shape[1], "axis": 1}
    return flags | {
        "W_q": torch.from_numpy(np.asarray(packed).astype(np.int32 if bits == 3 else np.uint8)),
        "scale": scales.reshape(-1, 1),
        "zero": zeros.reshape(-1, 1),
        "shape": torch.tensor(codes.shape),
        "packing": text(packing),
        "unpack_view_dtype": text("torch.uint8"),
        "compute_dtype": text("torch.float16"),
        **{name: torch.tensor(value, dtype=torch.int32) for name, value in integers.items()},
    }


FLAGS = (
    "view_as_float quant_scale quant_zero offload_meta encoded_state_dict stores_quant_config "
    "channel_wise optimize round_zero"
).split()


def read(parts: dict[str, torch.Tensor]) -> StoredTensor:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({f"x.{name}": part.contiguous() for name, part in parts.items()}, path)
        found = method_of(CONFIG).assemble(CONFIG, read_safetensors(path), "here")
    assert found.keys() == {"x.weight"}
    return found["x.weight"]


@settings(max_examples=100, deadline=None)
@given(
    bits=st.sampled_from(sorted(PACKED)),
    group=st.sampled_from([16, 32, 64, 192]),
    rows=st.integers(1, 4),
    is_rounded=st.booleans(),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 2**32),
)
def test_values(bits: int, group: int, rows: int, is_rounded: bool, dtype: str, seed: int) -> None:
    """Integer zeros give exact values; other zeros become a minimum, which is rounded
    once more.
    """
    rng, rows, cols = np.random.default_rng(seed), 8 * rows, 192
    shape = rows, cols // group
    codes = rng.integers(0, 1 << bits, (rows, cols))
    scales = torch.from_numpy(rng.standard_normal(shape)).to(DTYPES[dtype])
    points = rng.integers(0, 1 << bits, shape) if is_rounded else rng.uniform(-1, 1 << bits, shape)
    zeros = torch.from_numpy(points).to(DTYPES[dtype])
    tensor = read(parts_of(codes, scales, zeros, bits))
    factors, middles = (
        np.repeat(found.float().numpy(), group, axis=1) for found in (scales, zeros)
    )
    want = (codes.astype(np.float32) - middles) * factors
    assert tensor.shape == (rows, cols) and not tensor.parts["codes"].flags.owndata
    got = tensor.dequantise()
    if is_rounded:
        assert np.array_equal(got, want)
    assert np.all(np.abs(got - want) <= 3e-7 * (1 << bits) * np.abs(factors))
    some = rng.integers(0, rows, 5)
    assert np.array_equal(tensor.dequantise_rows(some), got[some])
    assert np.array_equal(tensor.take("some", np.arange(3, 8)).dequantise(), got[3:8])


def quantise(bits: int, is_rounded: bool) -> Any:
    def of(weight: NDArray[np.float32]) -> tuple[dict[str, torch.Tensor], NDArray[np.float32]]:
        blocks, top = weight.reshape(len(weight), -1, 32), (1 << bits) - 1
        low = blocks.min(axis=2)
        scales = torch.from_numpy((blocks.max(axis=2) - low) / top).half()
        s = scales.float().numpy()
        zeros = torch.from_numpy(
            np.clip(np.rint(-low / s), 0, top) if is_rounded else -low / s
        ).half()
        z = zeros.float().numpy()[..., None]
        codes = np.clip(np.rint(blocks / s[..., None] + z), 0, top).astype(int)
        return parts_of(codes.reshape(weight.shape), scales, zeros, bits), (
            (codes - z) * s[..., None]
        ).reshape(weight.shape)

    return of


@pytest.mark.parametrize(
    ("bits", "is_rounded"), [(4, True), (4, False), (3, False), (1, False), (8, True)]
)
def test_a_folder_is_computed(tmp_path: Path, bits: int, is_rounded: bool) -> None:
    check_engine(
        tmp_path, write(tmp_path, CONFIG, quantise(bits, is_rounded)), 0.05 if bits == 1 else 0.03
    )


@pytest.mark.parametrize("given", [LAYERS, {"self_attn.q_proj": LAYERS, "mlp.up_proj": None}])
def test_configurations_that_are_read(tmp_path: Path, given: dict[str, Any]) -> None:
    configure(tmp_path, tiny_llama(64, 96), CONFIG | {"quant_config": given})
    assert open_folder(tmp_path).spec.num_layers == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "quant_config = None"),
        ({"self_attn.q_proj": 4}, "quant_config = 4"),
        (LAYERS | {"weight_quant_params": None}, "quant_config = "),
        (LAYERS | {"weight_quant_params": PARAMS | {"axis": 0}}, r"weight_quant_params\.axis = 0"),
        ({"mlp.up_proj": {"weight_quant_params": {"nbits": 4}}}, r"weight_quant_params\.axis = 0"),
        (
            LAYERS | {"weight_quant_params": PARAMS | {"view_as_float": True}},
            r"weight_quant_params\.view_as_float = True",
        ),
        (
            LAYERS | {"weight_quant_params": PARAMS | {"channel_wise": False}},
            r"weight_quant_params\.channel_wise = False",
        ),
        (LAYERS | {"scale_quant_params": {"nbits": 8}}, "scale_quant_params"),
        (LAYERS | {"zero_quant_params": {"nbits": 8}}, "zero_quant_params"),
    ],
)
def test_refused(tmp_path: Path, given: Any, message: str) -> None:
    configure(tmp_path, tiny_llama(64, 96), CONFIG | {"quant_config": given})
    with pytest.raises(
        UnsupportedModelError, match=rf"quantization_config: {message}.*hqq with axis 1"
    ):
        open_folder(tmp_path)


def scalar(value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scale": None}, FormatError, r"q_proj\.scale is missing"),
        ({"zero": torch.zeros(128, 1, dtype=torch.uint8)}, FormatError, r"q_proj\.zero is U8"),
        ({"packing": None}, FormatError, r"q_proj\.packing is missing, expected U8"),
        (
            {"packing": text("5bit_u8")},
            UnsupportedModelError,
            r"q_proj\.packing is '5bit_u8'; supported",
        ),
        (
            {"packing": text("8bit_u8")},
            FormatError,
            r"q_proj\.W_q has shape \[64, 32\], expected \[128, 32\]",
        ),
        ({"packing": text("3bit_32")}, FormatError, r"q_proj\.W_q is U8 \[64, 32\], expected I32"),
        (
            {"scale": torch.ones(64, 2)},
            FormatError,
            r"q_proj\.scale has shape \[64, 2\], expected \[128, 1\]",
        ),
        (
            {"scale": torch.full((128, 1), float("inf"))},
            FormatError,
            r"q_proj\.scale has a number that is not finite",
        ),
        (
            {"zero": torch.full((128, 1), float("nan"))},
            FormatError,
            r"q_proj\.zero has a number that is not finite",
        ),
        (
            {"zero": torch.full((128, 1), -1e38), "scale": torch.full((128, 1), 1e38)},
            FormatError,
            r"q_proj\.zero has a number that is not",
        ),
        (
            {"shape": torch.tensor([64])},
            FormatError,
            r"q_proj\.shape is \[64\], not a matrix of groups of 32",
        ),
        ({"shape": torch.tensor([-64, -64])}, FormatError, "not a matrix"),
        ({"shape": torch.tensor([2**62, 64])}, FormatError, "not a matrix"),
        ({"shape": torch.tensor([128, 64])}, FormatError, r"q_proj\.W_q has shape"),
        ({"group_size": scalar(0)}, FormatError, "not a matrix of groups of 0"),
        ({"group_size": scalar(48)}, FormatError, "not a matrix of groups of 48"),
        (
            {"group_size": scalar(8)},
            UnsupportedModelError,
            r"q_proj\.group_size is 8; supported",
        ),
        ({"axis": scalar(0)}, UnsupportedModelError, r"q_proj\.axis is 0; supported: 1"),
        (
            {"view_as_float": scalar(1, torch.uint8)},
            UnsupportedModelError,
            r"q_proj\.view_as_float is 1",
        ),
        ({"quant_zero": scalar(1, torch.uint8)}, UnsupportedModelError, r"q_proj\.quant_zero is 1"),
        (
            {"axis": torch.ones(3)},
            FormatError,
            r"q_proj\.axis is F32 \[3\], expected I32 with 0 dimensions",
        ),
    ],
)
def test_malformed(
    tmp_path: Path, change: dict[str, torch.Tensor | None], error: type[Exception], message: str
) -> None:
    write(tmp_path, CONFIG, quantise(4, True))
    path = tmp_path / "model.safetensors"
    state = load_file(path) | {f"{NAME}.{part}": tensor for part, tensor in change.items()}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path)
