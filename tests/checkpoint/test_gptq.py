"""GPTQ files packed from the description, read and computed."""

from dataclasses import replace
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

from headrace.backend import lower_program
from headrace.checkpoint.folder import open_folder
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.quantisation import method_of
from headrace.checkpoint.safetensors import read_safetensors
from headrace.errors import FormatError, UnsupportedModelError
from headrace.model import trace_model
from headrace.program.ops import QkvRopeWrite
from headrace.quant.formats import StoredTensor
from tests.folders import check_engine, configure, tiny_llama
from tests.quantised import write

CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "damp_percent": 0.1,
}
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
NAME = "model.layers.1.self_attn.q_proj"


def pack(codes: NDArray[Any], bits: int) -> NDArray[np.uint32]:
    """Pack codes [n, m] as one bit stream a column, lowest first, into words [n * bits
    / 32, m].
    """
    stream = (
        (codes.T[:, :, None] >> np.arange(bits) & 1).astype(np.uint8).reshape(codes.shape[1], -1)
    )
    return np.ascontiguousarray(np.packbits(stream, axis=1, bitorder="little").view("<u4").T)


def ints(words: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).astype(np.uint32).view(np.int32))


def parts_of(
    codes: NDArray[Any],
    zeros: NDArray[Any],
    scales: torch.Tensor,
    groups: NDArray[Any],
    bits: int,
    v2: bool,
) -> dict[str, torch.Tensor]:
    """Pack codes [cols, rows], zero points and scales [groups, rows], groups [cols]."""
    points = pack(zeros.T if v2 else zeros.T - 1 & (1 << bits) - 1, bits).T
    if not v2 and bits in ONES:  # the same, but for zero points of 0, which borrow
        points = pack(zeros.T, bits).T - np.uint32(ONES[bits])
    return {
        "qweight": ints(pack(codes, bits)),
        "qzeros": ints(points),
        "scales": scales,
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }


def read(
    parts: dict[str, torch.Tensor], config: dict[str, Any], prefix: str = "x."
) -> StoredTensor:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({f"{prefix}{name}": part.contiguous() for name, part in parts.items()}, path)
        return method_of(CONFIG | config).assemble(CONFIG | config, read_safetensors(path), "here")[
            f"{prefix}weight"
        ]


@settings(max_examples=100, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    group=st.sampled_from([-1, 16, 32, 64]),
    count=st.integers(1, 3),
    rows=st.sampled_from([32, 64, 96]),
    v2=st.booleans(),
    ordered=st.booleans(),
    symmetric=st.booleans(),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 2**32),
)
def test_values_are_exact(
    bits: int,
    group: int,
    count: int,
    rows: int,
    v2: bool,
    ordered: bool,
    symmetric: bool,
    dtype: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    cols = 64 * count
    size = cols if group == -1 else group
    groups = np.arange(cols) // size
    if ordered:
        rng.shuffle(groups)
    shape = cols // size, rows
    codes = rng.integers(0, 1 << bits, (cols, rows))
    zeros = np.full(shape, 1 << bits - 1) if symmetric else rng.integers(0, 1 << bits, shape)
    scales = torch.from_numpy(rng.standard_normal(shape)).to(DTYPES[dtype])
    parts = parts_of(codes, zeros, scales, groups, bits, v2)
    if not ordered and seed % 2:
        del parts["g_idx"]
    tensor = read(
        parts,
        {
            "bits": bits,
            "group_size": group,
            "checkpoint_format": "gptq_v2" if v2 else "gptq",
            "desc_act": ordered,
        },
    )
    want = (codes - zeros[groups]).astype(np.float32) * scales.float().numpy()[groups]
    assert tensor.shape == (rows, cols)
    assert np.array_equal(tensor.dequantise(), want.T)
    some = rng.integers(0, rows, 5)
    assert np.array_equal(tensor.dequantise_rows(some), want.T[some])
    assert np.array_equal(tensor.take("some", np.arange(8, 16)).dequantise(), want.T[8:16])
    assert (
        tensor.format
        is read(
            parts, {"bits": bits, "group_size": group, "format": "gptq_v2" if v2 else "gptq"}
        ).format
    )


def test_groups_that_are_all_0_are_in_order() -> None:
    rng = np.random.default_rng(0)
    codes, zeros, scales = (
        rng.integers(0, 16, (64, 32)),
        rng.integers(0, 16, (2, 32)),
        torch.rand(2, 32),
    )
    matrices = [
        read(parts_of(codes, zeros, scales, groups, 4, True), {"format": "gptq_v2"})
        for groups in (np.zeros(64), np.arange(64) // 32)
    ]
    assert np.array_equal(*(matrix.dequantise() for matrix in matrices))


def test_codes_stay_in_the_file() -> None:
    codes, groups = np.zeros((64, 32), int), np.arange(64) // 32
    tensor = read(parts_of(codes, np.full((2, 32), 8), torch.ones(2, 32), groups, 4, False), {})
    assert not tensor.parts["codes"].flags.owndata and tensor.parts["codes"].shape == (32, 8)
    assert set(tensor.parts) == {"codes", "scales"}


def quantise(
    bits: int, v2: bool, ordered: str = "", group: int = 32, symmetric: bool = False
) -> Any:
    def of(weight: NDArray[np.float32]) -> tuple[dict[str, torch.Tensor], NDArray[np.float32]]:
        w = weight.T
        groups = np.arange(len(w)) // group
        if ordered:  # what reads the same rows has the same order, or each matrix its own
            np.random.default_rng(w.shape if ordered == "apart" else len(w)).shuffle(groups)
        top = (1 << bits) - 1
        low, high = (
            np.stack([pick(w[groups == g], axis=0) for g in range(groups.max() + 1)])
            for pick in (np.min, np.max)
        )
        scales = torch.from_numpy(
            2 * np.maximum(-low, high) / top if symmetric else (high - low) / top
        ).half()
        s = scales.float().numpy()
        zeros = (
            np.full(s.shape, 1 << bits - 1)
            if symmetric
            else np.clip(np.rint(-low / s), 0, top).astype(int)
        )
        codes = np.clip(np.rint(w / s[groups]) + zeros[groups], 0, top).astype(int)
        return parts_of(codes, zeros, scales, groups, bits, v2), np.ascontiguousarray(
            ((codes - zeros[groups]) * s[groups]).T
        )

    return of


@pytest.mark.parametrize(
    ("bits", "v2", "symmetric"),
    [(4, False, True), (4, True, False), (3, False, False), (2, True, True), (8, False, False)],
)
def test_a_folder_is_computed(tmp_path: Path, bits: int, v2: bool, symmetric: bool) -> None:
    config = CONFIG | {"bits": bits, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    check_engine(tmp_path, write(tmp_path, config, quantise(bits, v2, symmetric=symmetric)))


@pytest.mark.parametrize("ordered", ["together", "apart"])
def test_the_order_of_activations(tmp_path: Path, ordered: str) -> None:
    """Fused ops if their matrices share an order, else single ops."""
    check_engine(
        tmp_path, write(tmp_path, CONFIG | {"desc_act": True}, quantise(4, False, ordered=ordered))
    )
    checkpoint = open_checkpoint(tmp_path)
    program = lower_program(
        "cpu", trace_model(checkpoint.spec, checkpoint.tensors), checkpoint.tensors
    )
    assert any(isinstance(op, QkvRopeWrite) for op in program.ops) == (ordered == "together")


def test_an_order_that_no_linear_op_reads_is_refused(tmp_path: Path) -> None:
    write(tmp_path, CONFIG | {"desc_act": True}, quantise(4, False, ordered="together"))
    checkpoint = open_checkpoint(tmp_path)
    tensors = {
        **checkpoint.tensors,
        "embed": replace(checkpoint.tensors["layers.0.q"], shape=checkpoint.tensors["embed"].shape),
    }
    with pytest.raises(UnsupportedModelError, match=r"embed.*act order"):
        lower_program("cpu", trace_model(checkpoint.spec, tensors), tensors)


class TestConfigs:
    @pytest.mark.parametrize(
        "change",
        [
            {},
            {
                "checkpoint_format": "gptq_v2",
                "meta": {"quantizer": ["gptqmodel:7.7.0"]},
                "pack_dtype": "int32",
                "lm_head": False,
            },
            {"group_size": -1, "dynamic": {"-:.*down_proj": {}}, "rotation": None, "adapter": None},
            {"bits": 8, "is_marlin_format": False, "static_groups": True},
        ],
    )
    def test_read(self, tmp_path: Path, change: dict[str, Any]) -> None:
        configure(tmp_path, tiny_llama(64, 96), CONFIG | change)
        assert open_folder(tmp_path).spec.num_layers == 3

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"bits": 5}, "bits = 5"),
            ({"bits": "4"}, "bits = 4"),
            ({"bits": 4.0}, r"bits = 4\.0"),
            ({"bits": None}, "bits = None"),
            ({"group_size": 48}, "group_size = 48"),
            ({"group_size": 0}, "group_size = 0"),
            ({"group_size": -2}, "group_size = -2"),
            ({"group_size": None}, "group_size = None"),
            ({"checkpoint_format": "marlin"}, "checkpoint_format = marlin"),
            ({"format": "gptq_p"}, "format = gptq_p"),
            ({"is_marlin_format": True}, "is_marlin_format"),
            ({"pack_dtype": "int16"}, "pack_dtype = int16"),
            ({"rotation": "hadamard"}, "rotation = hadamard"),
            ({"adapter": {"name": "lora"}}, "adapter"),
            ({"dynamic": {"+:.*q_proj": {"bits": 8}}}, "dynamic"),
            ({"dynamic": [1]}, "dynamic"),
        ],
    )
    def test_refused(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        configure(tmp_path, tiny_llama(64, 96), CONFIG | change)
        with pytest.raises(
            UnsupportedModelError, match=rf"quantization_config: {message}.*gptq with"
        ):
            open_folder(tmp_path)


class TestMalformed:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"qzeros": None}, r"q_proj\.qzeros is missing, expected I32"),
            ({"scales": None}, r"q_proj\.scales is missing, expected floats"),
            ({"qweight": torch.zeros(8, 64)}, r"q_proj\.qweight is F32 \[8, 64\], expected I32"),
            ({"qweight": torch.zeros(512, dtype=torch.int32)}, "expected I32 with 2 dimensions"),
            ({"scales": torch.zeros(2, 64, dtype=torch.int32)}, "scales is I32"),
            (
                {"scales": torch.ones(2, 32)},
                r"q_proj\.scales has shape \[2, 32\], expected \[2, 64\]",
            ),
            (
                {"qzeros": torch.zeros(1, 8, dtype=torch.int32)},
                r"q_proj\.qzeros has shape \[1, 8\], expected \[2, 8\]",
            ),
            (
                {"qweight": torch.zeros(7, 64, dtype=torch.int32)},
                r"q_proj\.qweight has 56 columns, not a multiple of the group of 32",
            ),
            (
                {"scales": torch.full((2, 64), float("nan"))},
                r"q_proj\.scales has a number that is not finite",
            ),
            (
                {"scales": torch.full((2, 64), float("inf")).half()},
                r"q_proj\.scales has a number that is not finite",
            ),
            (
                {"g_idx": torch.zeros(63, dtype=torch.int32)},
                r"q_proj\.g_idx does not assign 64 columns to 2 groups",
            ),
            ({"g_idx": torch.full((64,), 2, dtype=torch.int32)}, "does not assign"),
            ({"g_idx": torch.full((64,), -1, dtype=torch.int32)}, "does not assign"),
            ({"g_idx": torch.zeros(64)}, r"g_idx is F32 \[64\], expected I32 with 1 dimension"),
            ({"weight": torch.ones(64, 64)}, r"q_proj\.weight and .*qweight exclude each other"),
        ],
    )
    def test_tensors(
        self, tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
    ) -> None:
        write(tmp_path, CONFIG, quantise(4, False))
        path = tmp_path / "model.safetensors"
        state = load_file(path) | {f"{NAME}.{part}": tensor for part, tensor in change.items()}
        save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)
        with pytest.raises(FormatError, match=message):
            open_checkpoint(tmp_path)

    def test_groups_of_other_sizes(self) -> None:
        groups = np.arange(64) // 32
        groups[0] = 1
        parts = parts_of(
            np.zeros((64, 32), int), np.ones((2, 32), int), torch.ones(2, 32), groups, 4, False
        )
        with pytest.raises(
            UnsupportedModelError, match=r"x\.g_idx has groups that do not have 32 columns"
        ):
            read(parts, {})

    def test_words_that_3_bits_do_not_fill(self) -> None:
        parts = parts_of(
            np.zeros((64, 32), int),
            np.ones((1, 32), int),
            torch.ones(1, 32),
            np.zeros(64),
            3,
            False,
        )
        with pytest.raises(
            FormatError, match=r"x\.qweight has shape \[4, 32\], which codes of 3 bits do not fill"
        ):
            read(parts | {"qweight": parts["qweight"][:4]}, {"bits": 3, "group_size": -1})
