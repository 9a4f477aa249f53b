"""bitsandbytes weights of 4 and 8 bits, packed from the description, read and computed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.errors import FormatError, UnsupportedModelError
from headrace.quant.spec import CODEBOOKS
from tests.folders import assembled, check_engine, tiny_llama, write_folder

Tensors = dict[str, torch.Tensor]
VALUES = {kind: np.array(CODEBOOKS[kind], np.float32) for kind in ("nf4", "fp4")}
FOUR = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
}
EIGHT = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": False,
    "load_in_8bit": True,
    "llm_int8_threshold": 6.0,
}


def packed(
    kind: str,
    codes: NDArray[Any],
    absmax: NDArray[Any],
    size: int,
    name: str = "x.weight",
    **state: Any,
) -> Tensors:
    """The tensors of a matrix of 4-bit codes, the first of two in the high half."""
    flat = codes.reshape(-1).astype(np.uint8)
    text = json.dumps(
        {"quant_type": kind, "blocksize": size, "dtype": "float32", "shape": codes.shape} | state
    )
    return {
        name: torch.from_numpy(flat[::2] << 4 | flat[1::2])[:, None],
        f"{name}.absmax": torch.from_numpy(absmax),
        f"{name}.quant_map": torch.from_numpy(VALUES[kind].copy()),
        f"{name}.quant_state.bitsandbytes__{kind}": torch.frombuffer(
            bytearray(text.encode()), dtype=torch.uint8
        ),
    }


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kind=st.sampled_from(["nf4", "fp4"]),
    rows=st.integers(1, 40),
    cols=st.sampled_from([16, 32, 64, 96, 128, 160, 320, 48]),
    size=st.sampled_from([32, 64, 128, 256, 4096]),
    is_nested=st.booleans(),
    storage=st.sampled_from([torch.uint8, torch.bfloat16]),
)
def test_blocks_of_4_bits(
    kind: str,
    rows: int,
    cols: int,
    size: int,
    is_nested: bool,
    storage: torch.dtype,
    tmp_path: Path,
) -> None:
    """A block may be a part of a row, several rows, or parts of two; its bytes may be
    stored in a wider type.
    """
    rng, count = np.random.default_rng(rows * size), -(-rows * cols // size)
    codes = rng.integers(0, 16, (rows, cols))
    absmax = rng.uniform(0.1, 2, count).astype(np.float32)
    nested: Tensors = {}
    state: dict[str, Any] = {}
    scales = absmax
    if is_nested:
        absmax = rng.integers(0, 256, count).astype(np.uint8)
        coarse, values = (
            rng.uniform(0.1, 2, -(-count // 3)).astype(np.float32),
            rng.uniform(-1, 1, 256).astype(np.float32),
        )
        scales = values[absmax] * np.repeat(coarse, 3)[:count] + np.float32(0.625)
        state = {"nested_blocksize": 3, "nested_offset": 0.625, "nested_dtype": "float32"}
        nested = {
            "x.weight.nested_absmax": torch.from_numpy(coarse),
            "x.weight.nested_quant_map": torch.from_numpy(values),
        }
    tensors = packed(kind, codes, absmax, size, **state) | nested
    tensors["x.weight"] = tensors["x.weight"].reshape(-1).view(storage)[:, None]
    found = assembled(tmp_path, FOUR | {"bnb_4bit_quant_type": kind}, tensors)
    want = (VALUES[kind][codes].reshape(-1) * np.repeat(scales, size)[: codes.size]).reshape(
        rows, cols
    )
    assert found.keys() == {"x.weight"} and found["x.weight"].shape == (rows, cols)
    assert np.array_equal(found["x.weight"].dequantise(), want)
    some = rng.permutation(rows)[:5]
    assert np.array_equal(found["x.weight"].take("y", some).dequantise(), want[some])
    assert np.array_equal(
        found["x.weight"].take("y", np.arange(rows // 2, rows)).dequantise(), want[rows // 2 :]
    )


@pytest.mark.parametrize(
    ("has_layout", "threshold", "format"),
    [(True, {}, "I8_MIXED"), (False, {"llm_int8_threshold": 0.0}, "I8_ROW")],
)
def test_8_bits(has_layout: bool, threshold: dict[str, float], format: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    codes, largest = (
        rng.integers(-127, 128, (20, 30)).astype(np.int8),
        rng.uniform(0.1, 2, 20).astype(np.float32),
    )
    tensors = {"x.weight": torch.from_numpy(codes), "x.SCB": torch.from_numpy(largest)}
    layout = {"x.weight_format": torch.tensor(0, dtype=torch.uint8)} if has_layout else {}
    found = assembled(tmp_path, EIGHT | threshold, tensors | layout)
    assert found.keys() == {"x.weight"} and found["x.weight"].format.name == format
    assert np.array_equal(
        found["x.weight"].dequantise(), codes * (largest / np.float32(127))[:, None]
    )


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_the_engine_computes_them(kind: str, tmp_path: Path) -> None:
    def stored(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        if kind == "int8":
            largest = weight.abs().amax(dim=1)
            codes = (weight * (127 / largest[:, None])).round().to(torch.int8)
            tensors = {
                name: codes,
                name.replace("weight", "SCB"): largest,
                f"{name}_format": torch.tensor(0, dtype=torch.uint8),
            }
            return codes * (largest / 127)[:, None], tensors
        blocks = weight.numpy().reshape(-1, 64)
        absmax = np.abs(blocks).max(axis=1)
        fours = np.abs((blocks / absmax[:, None])[..., None] - VALUES[kind]).argmin(axis=-1)
        values = torch.from_numpy((VALUES[kind][fours] * absmax[:, None]).reshape(weight.shape))
        return values, packed(kind, fours.reshape(weight.shape), absmax, 64, name)

    model = tiny_llama(64, 96)
    write_folder(
        tmp_path, model, EIGHT if kind == "int8" else FOUR | {"bnb_4bit_quant_type": kind}, stored
    )
    check_engine(tmp_path, model)


NESTED = {
    "x.weight.absmax": torch.ones(8, dtype=torch.uint8),
    "x.weight.nested_absmax": torch.ones(1),
    "x.weight.nested_quant_map": torch.ones(256),
}


class TestMalformed:
    TENSORS = packed("nf4", np.ones((8, 64), int), np.ones(8, np.float32), 64)
    STATE = "x.weight.quant_state.bitsandbytes__nf4"

    def state(self, **changes: Any) -> Tensors:
        text = json.dumps(
            {"blocksize": 64, "shape": [8, 64], "nested_blocksize": 256, "nested_offset": 0.5}
            | changes
        )
        return {self.STATE: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}

    def read(
        self, tmp_path: Path, tensors: dict[str, torch.Tensor | None], config: dict[str, Any] = FOUR
    ) -> None:
        assembled(
            tmp_path,
            config,
            {name: tensor for name, tensor in tensors.items() if tensor is not None},
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"x.weight": None}, r"x\.weight does not have the bytes of a matrix \[8, 64\]"),
            (
                {"x.weight": torch.zeros(255, 1, dtype=torch.uint8)},
                r"x\.weight does not have the bytes",
            ),
            ({"x.weight.absmax": None}, r"x\.weight\.absmax is missing"),
            ({"x.weight.absmax": torch.ones(7)}, r"x\.weight\.absmax has shape \[7\]"),
            (
                {"x.weight.absmax": torch.full((8,), torch.nan)},
                r"x\.weight\.absmax has a number that is not finite",
            ),
            (
                {"x.weight.absmax": torch.ones(8, dtype=torch.int32)},
                r"x\.weight\.absmax is missing or not a list of numbers",
            ),
            (
                {"x.weight.quant_map": torch.ones(16)},
                r"x\.weight\.quant_map does not have the 16 values of nf4",
            ),
            (
                {"x.weight.quant_map": torch.full((16,), torch.nan)},
                r"x\.weight\.quant_map does not have the 16 values of nf4",
            ),
            (
                {"x.weight.quant_map": torch.ones(8)},
                r"x\.weight\.quant_map does not have the 16 values",
            ),
            ({STATE: torch.zeros(9)}, r"bitsandbytes__nf4 is not a JSON object"),
            ({STATE: torch.zeros(9, dtype=torch.uint8)}, r"bitsandbytes__nf4 is not valid"),
            (
                {STATE: torch.tensor([ord("3")], dtype=torch.uint8)},
                r"bitsandbytes__nf4 has no valid shape",
            ),
        ],
    )
    def test_parts(
        self, change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(FormatError, match=message):
            self.read(tmp_path, self.TENSORS | change)

    @pytest.mark.parametrize(
        "changes",
        [
            {"blocksize": 0},
            {"blocksize": 64.0},
            {"shape": [8]},
            {"shape": [8, -64]},
            {"shape": None},
        ],
    )
    def test_states(self, changes: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(
            FormatError, match=r"bitsandbytes__nf4 has no valid shape .* and blocksize"
        ):
            self.read(tmp_path, self.TENSORS | self.state(**changes))

    @pytest.mark.parametrize(
        ("change", "changes", "message"),
        [
            ({}, {"nested_blocksize": None}, "no valid nested_blocksize and nested_offset"),
            ({}, {"nested_offset": "0"}, "no valid nested_blocksize and nested_offset"),
            ({}, {"nested_offset": float("nan")}, "no valid nested_blocksize and nested_offset"),
            ({}, {"nested_offset": 10**400}, "no valid nested_blocksize and nested_offset"),
            ({}, {"nested_offset": 1e300}, "no valid nested_blocksize and nested_offset"),
            ({"x.weight.nested_absmax": None}, {}, r"x\.weight\.nested_absmax is missing"),
            (
                {"x.weight.nested_absmax": torch.ones(2)},
                {},
                r"nested_absmax and x\.weight\.nested_quant_map do not fit 8",
            ),
            ({"x.weight.nested_quant_map": torch.ones(16)}, {}, r"nested_quant_map do not fit 8"),
            (
                {
                    "x.weight.nested_absmax": torch.full((1,), 3e38),
                    "x.weight.nested_quant_map": torch.full((256,), 2.0),
                },
                {},
                "not finite",
            ),
        ],
    )
    def test_nested_scales(
        self,
        change: dict[str, torch.Tensor | None],
        changes: dict[str, Any],
        message: str,
        tmp_path: Path,
    ) -> None:
        self.read(tmp_path, self.TENSORS | NESTED | self.state())
        with pytest.raises(FormatError, match=message):
            self.read(tmp_path, self.TENSORS | NESTED | self.state(**changes) | change)

    def test_what_no_kernel_reads(self, tmp_path: Path) -> None:
        with pytest.raises(
            UnsupportedModelError, match=r"x\.weight has blocks of 64 in rows of 72"
        ):
            self.read(tmp_path, packed("nf4", np.ones((8, 72), int), np.ones(9, np.float32), 64))
        other = self.TENSORS | {
            self.STATE: None,
            self.STATE.replace("nf4", "int4"): self.TENSORS[self.STATE],
        }
        with pytest.raises(UnsupportedModelError, match=r"x\.weight is int4"):
            self.read(tmp_path, other)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"x.SCB": None}, FormatError, r"x\.weight of int8 \[8, 4\] has no x\.SCB"),
            ({"x.SCB": torch.ones(7)}, FormatError, r"has no x\.SCB with a float32 for each row"),
            (
                {"x.SCB": torch.full((8,), torch.inf)},
                FormatError,
                r"x\.SCB has a number that is not finite",
            ),
            (
                {"x.weight_format": torch.tensor(2, dtype=torch.uint8)},
                UnsupportedModelError,
                r"x\.weight_format is 2",
            ),
        ],
    )
    def test_8_bits(
        self,
        change: dict[str, torch.Tensor | None],
        error: type[Exception],
        message: str,
        tmp_path: Path,
    ) -> None:
        tensors = {"x.weight": torch.ones(8, 4, dtype=torch.int8), "x.SCB": torch.ones(8)}
        with pytest.raises(error, match=message):
            self.read(tmp_path, tensors | change, EIGHT)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (FOUR | {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type = int4"),
            (FOUR | {"load_in_4bit": False}, "load_in_4bit = False"),
            (FOUR | {"load_in_8bit": True}, "load_in_4bit = True"),
        ],
    )
    def test_configurations(self, config: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(
            UnsupportedModelError,
            match=f"quantization_config: {message} is not supported; .*bitsandbytes of 4 bits",
        ):
            self.read(tmp_path, self.TENSORS, config)
