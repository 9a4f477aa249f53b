"""AWQ files packed from the description, read and computed."""

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

CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
NAME = "model.layers.1.self_attn.q_proj"


def pack(codes: NDArray[Any]) -> torch.Tensor:
    """Pack codes [n, rows] into words [n, rows / 8]: of 8 neighbours, 0, 2, 4, 6, 1, 3,
    5, 7, lowest bits first.
    """
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint64)
    for at, row in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        words += codes[:, row::8].astype(np.uint64) << np.uint64(4 * at)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def parts_of(
    codes: NDArray[Any], zeros: NDArray[Any], scales: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Pack codes [cols, rows], zero points and scales [groups, rows]."""
    return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}


def read(parts: dict[str, torch.Tensor], config: dict[str, Any]) -> StoredTensor:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({f"x.{name}": part.contiguous() for name, part in parts.items()}, path)
        return method_of(CONFIG | config).assemble(CONFIG | config, read_safetensors(path), "here")[
            "x.weight"
        ]


@settings(max_examples=60, deadline=None)
@given(
    group=st.sampled_from([-1, 16, 32, 64]),
    count=st.integers(1, 3),
    rows=st.integers(1, 6),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 2**32),
)
def test_values_are_exact(group: int, count: int, rows: int, dtype: str, seed: int) -> None:
    rng, cols, rows = np.random.default_rng(seed), 64 * count, 8 * rows
    groups = np.arange(cols) // (cols if group == -1 else group)
    shape = groups.max() + 1, rows
    codes, zeros = rng.integers(0, 16, (cols, rows)), rng.integers(0, 16, shape)
    scales = torch.from_numpy(rng.standard_normal(shape)).to(DTYPES[dtype])
    tensor = read(parts_of(codes, zeros, scales), {"group_size": group})
    want = ((codes - zeros[groups]).astype(np.float32) * scales.float().numpy()[groups]).T
    assert tensor.shape == (rows, cols)
    assert np.array_equal(tensor.dequantise(), want)
    some = rng.integers(0, rows, 5)
    assert np.array_equal(tensor.dequantise_rows(some), want[some])
    assert np.array_equal(tensor.take("some", np.arange(3, 8)).dequantise(), want[3:8])
    assert not tensor.parts["codes"].flags.owndata


def quantise(weight: NDArray[np.float32]) -> tuple[dict[str, torch.Tensor], NDArray[np.float32]]:
    w = weight.T
    groups = np.arange(len(w)) // 32
    low, high = (pick(w.reshape(-1, 32, w.shape[1]), axis=1) for pick in (np.min, np.max))
    scales = torch.from_numpy((high - low) / 15).half()
    s = scales.float().numpy()
    zeros = np.clip(np.rint(-low / s), 0, 15).astype(int)
    codes = np.clip(np.rint(w / s[groups]) + zeros[groups], 0, 15).astype(int)
    return parts_of(codes, zeros, scales), np.ascontiguousarray(
        ((codes - zeros[groups]) * s[groups]).T
    )


def test_a_folder_is_computed(tmp_path: Path) -> None:
    check_engine(tmp_path, write(tmp_path, CONFIG, quantise))


class TestConfigs:
    @pytest.mark.parametrize(
        "change",
        [{}, {"version": "GEMM"}, {"format": "gemm", "backend": "autoawq"}, {"group_size": -1}],
    )
    def test_read(self, tmp_path: Path, change: dict[str, Any]) -> None:
        configure(tmp_path, tiny_llama(64, 96), CONFIG | change)
        assert open_folder(tmp_path).spec.num_layers == 3

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"bits": 8}, "bits = 8"),
            ({"bits": None}, "bits = None"),
            ({"zero_point": False}, "zero_point = False"),
            ({"version": "gemv"}, "version = gemv"),
            ({"version": "GEMV_FAST"}, "version = GEMV_FAST"),
            ({"version": None}, "version = None"),
            ({"format": "marlin"}, "format = marlin"),
            ({"backend": "llm-awq"}, "backend = llm-awq"),
            ({"group_size": 40}, "group_size = 40"),
            ({"group_size": True}, "group_size = True"),
        ],
    )
    def test_refused(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        configure(tmp_path, tiny_llama(64, 96), CONFIG | change)
        with pytest.raises(
            UnsupportedModelError, match=rf"quantization_config: {message}.*awq with"
        ):
            open_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qzeros": None}, r"q_proj\.qzeros is missing, expected I32"),
        ({"scales": None}, r"q_proj\.scales is missing, expected floats"),
        ({"qweight": torch.zeros(64, 8)}, r"q_proj\.qweight is F32 \[64, 8\], expected I32"),
        ({"scales": torch.ones(2, 32)}, r"q_proj\.scales has shape \[2, 32\], expected \[2, 64\]"),
        (
            {"qzeros": torch.zeros(4, 8, dtype=torch.int32)},
            r"q_proj\.qzeros has shape \[\d, 8\], expected \[2, \d\]",
        ),
        (
            {"qweight": torch.zeros(63, 8, dtype=torch.int32)},
            r"q_proj\.qweight has 63 columns, not a multiple of the group of 32",
        ),
        (
            {"qweight": torch.zeros(64, 9, dtype=torch.int32)},
            r"q_proj\.qzeros has shape \[\d, 8\], expected \[2, \d\]",
        ),
        (
            {"scales": torch.full((2, 64), float("inf"))},
            r"q_proj\.scales has a number that is not finite",
        ),
        (
            {"scales": torch.full((2, 64), float("nan")).bfloat16()},
            r"q_proj\.scales has a number that is not finite",
        ),
    ],
)
def test_malformed(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    write(tmp_path, CONFIG, quantise)
    path = tmp_path / "model.safetensors"
    state = load_file(path) | {f"{NAME}.{part}": tensor for part, tensor in change.items()}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path)
