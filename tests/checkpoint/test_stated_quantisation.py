"""The places and names in which tools state how a folder is quantised."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.checkpoint.folder import open_folder
from headrace.checkpoint.load import open_checkpoint
from headrace.errors import UnsupportedModelError
from tests.checkpoint import test_awq, test_gptq
from tests.folders import configure, tiny_llama
from tests.quantised import write

GPTQ = {key: test_gptq.CONFIG[key] for key in ("bits", "group_size", "desc_act", "sym")}
AWQ = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
ROUND = {"quant_method": "auto-round", "data_type": "int", "bits": 4, "group_size": 32}
PLAIN = {"model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"}}


def gptq(folder: Path, v2: bool) -> None:
    config = test_gptq.CONFIG | {"checkpoint_format": "gptq_v2" if v2 else "gptq", "sym": False}
    write(folder, config, test_gptq.quantise(4, v2))


def awq(folder: Path, v2: bool) -> None:
    write(folder, test_awq.CONFIG, test_awq.quantise)


def restate(folder: Path, config: dict[str, Any] | None, file: str = "", text: Any = None) -> None:
    """Replace the `quantization_config`, and write a tool's own file."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    del values["quantization_config"]
    path.write_text(json.dumps(values | ({"quantization_config": config} if config else {})))
    if file:
        (folder / file).write_text(json.dumps(text))


@pytest.mark.parametrize(
    ("make", "v2", "config", "file", "text"),
    [
        (gptq, False, None, "quantize_config.json", GPTQ | {"sym": False}),
        (gptq, True, None, "quantize_config.json", GPTQ | {"checkpoint_format": "gptq_v2"}),
        (awq, False, None, "quant_config.json", AWQ),
        (gptq, False, ROUND | {"packing_format": "auto_round:auto_gptq"}, "", None),
        (gptq, True, ROUND | {"packing_format": "auto_round:gptqmodel"}, "", None),
        (gptq, True, ROUND | {"packing_format": "auto_round"}, "", None),
        (gptq, False, ROUND | {"extra_config": PLAIN}, "", None),
        (gptq, False, ROUND | {"quant_method": "intel/auto-round"}, "", None),
        (awq, False, ROUND | {"packing_format": "auto_round:auto_awq"}, "", None),
    ],
)
def test_the_weights_are_those_of_the_usual_statement(
    tmp_path: Path,
    make: Callable[[Path, bool], None],
    v2: bool,
    config: dict[str, Any] | None,
    file: str,
    text: Any,
) -> None:
    make(tmp_path, v2)
    want = {name: t.dequantise() for name, t in open_checkpoint(tmp_path).tensors.items()}
    restate(tmp_path, config, file, text)
    found = open_checkpoint(tmp_path).tensors
    assert found.keys() == want.keys()
    for name, values in want.items():
        assert np.array_equal(found[name].dequantise(), values)


def test_a_file_next_to_plain_tensors_says_nothing(tmp_path: Path) -> None:
    model = tiny_llama(64, 96)
    model.save_pretrained(tmp_path)
    (tmp_path / "quantize_config.json").write_text('{"bits": 5}')
    assert open_checkpoint(tmp_path).tensors["layers.0.q"].format.name == "F32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packing_format": "auto_round:marlin"}, "packing_format = auto_round:marlin"),
        ({"packing_format": 3}, "packing_format = 3"),
        ({"data_type": "mx_fp"}, "data_type = mx_fp"),
        ({"extra_config": {"a.b": {"bits": 8}}}, r"extra_config: a\.b"),
        ({"extra_config": {"a.b": {"group_size": 64}}}, r"extra_config: a\.b"),
        ({"extra_config": {"a.b": 3}}, r"extra_config: a\.b"),
    ],
)
def test_other_forms_of_autoround_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    configure(tmp_path, tiny_llama(64, 96), ROUND | change)
    with pytest.raises(UnsupportedModelError, match=message):
        open_folder(tmp_path)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("stated_v2", [False, True])
def test_symmetric_zero_points_under_the_name_of_the_other_format(
    bits: int, stated_v2: bool
) -> None:
    """GPTQModel and others name the format `gptq` and store zero points of `gptq_v2`."""
    codes = np.random.default_rng(0).integers(0, 1 << bits, (64, 32))
    zeros = np.full((2, 32), 1 << bits - 1)
    scales = test_gptq.torch.rand(2, 32)
    groups = np.arange(64) // 32
    parts = test_gptq.parts_of(codes, zeros, scales, groups, bits, v2=not stated_v2)
    config = {"bits": bits, "checkpoint_format": "gptq_v2" if stated_v2 else "gptq"}
    tensor = test_gptq.read(parts, config)
    want = (codes - zeros[groups]) * scales.numpy()[groups]
    assert np.allclose(tensor.dequantise(), want.T)
    # Without `sym`, the zero points are as the format says.
    shifted = test_gptq.read(parts, config | {"sym": False}).dequantise()
    assert not np.allclose(shifted, want.T)
