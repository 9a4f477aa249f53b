"""EAGLE-3 drafters in both published layouts, and folders that are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.checkpoint.drafters import is_drafter, open_drafter
from headrace.checkpoint.load import Checkpoint
from headrace.errors import FormatError, HeadraceError, RequestError, UnsupportedModelError
from tests.drafters import random_drafter, stored_tensors, write_drafter
from tests.tiny import tiny_model

MODEL = tiny_model(4, layers=8)
TAPS = (2, 4, 5)
DRAFTER = random_drafter(MODEL, vocab=20, taps=TAPS)
LAYOUTS = ("authors", "speculators")
TARGET = Checkpoint(
    path=Path("target"),
    spec=MODEL[0],
    tensors=MODEL[1],
    chat_template=None,
    tokenizer_source=Path("target"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("vocab", [0, 20])
def test_eagle3_layouts_give_the_same_drafter(tmp_path: Path, layout: str, vocab: int) -> None:
    drafter = random_drafter(MODEL, vocab=vocab, taps=TAPS)
    folder = write_drafter(tmp_path / "drafter", drafter, layout)
    assert is_drafter(folder)
    found = open_drafter(folder, TARGET)
    assert found.spec.drafter == drafter.spec.drafter
    assert found.tensors.keys() == drafter.tensors.keys()
    assert found.tensors["embed"] is TARGET.tensors["embed"]  # also if the folder has a copy
    for name, tensor in drafter.tensors.items():
        np.testing.assert_array_equal(found.tensors[name].dequantise(), tensor.dequantise())
    if drafter.tokens is None:
        assert found.tokens is None
    else:
        np.testing.assert_array_equal(found.tokens, drafter.tokens)


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        ({"eagle_config": None}, (2, 4, 5)),  # those of the authors for 8 layers
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}, (1, 3)),
        ({"eagle_aux_hidden_state_layer_ids": [7]}, (7,)),
        ({"eagle_aux_hidden_state_layer_ids": [4, 8]}, (4, 8)),  # 8: after the last layer
    ],
)
def test_eagle3_taps(tmp_path: Path, changes: dict[str, Any], taps: tuple[int, ...]) -> None:
    fuse = torch.zeros(32, 32 * len(taps))
    folder = write_drafter(tmp_path, DRAFTER, "authors", {"fc.weight": fuse}, **changes)
    drafter = open_drafter(folder, TARGET).spec.drafter
    assert drafter and drafter.taps == taps


def test_eagle3_options_of_speculators(tmp_path: Path) -> None:
    drafter = random_drafter(MODEL, taps=TAPS, norm_before_residual=True)
    folder = write_drafter(
        tmp_path, drafter, "speculators", {"verifier_norm.weight": torch.ones(32)}
    )
    found = open_drafter(folder, TARGET).spec.drafter
    assert found and found.norm_before_residual


def changed(name: str, values: Any) -> dict[str, torch.Tensor | None]:
    return {name: None if values is None else torch.from_numpy(np.array(values))}


def shifted(**changes: int) -> NDArray[np.int64]:
    shifts: NDArray[np.int64] = stored_tensors(DRAFTER, "authors")["d2t"].numpy().copy()
    for index, value in changes.items():
        shifts[int(index[1:])] = value
    return shifts


@pytest.mark.parametrize(
    ("tensors", "config", "error", "message"),
    [
        ({}, {"hidden_size": 64}, RequestError, "hidden size 64, and this model's is 32; choose"),
        ({}, {"vocab_size": 99}, RequestError, "vocabulary size 99, and this model's is 61; cho"),
        (
            {},
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
            RequestError,
            "rows before layers 2, 4, 9, and this model has layers 0 to 7; choose",
        ),
        (
            {},
            {"eagle_aux_hidden_state_layer_ids": []},
            UnsupportedModelError,
            "eagle_aux_hidden_state_layer_ids = [] is not supported",
        ),
        ({"d2t": None, "t2d": None}, {}, FormatError, "draft_vocab_size is 20 of 61 tokens, but"),
        ({"d2t": [0] * 19}, {}, FormatError, "d2t maps 19 tokens, but draft_vocab_size is 20; ch"),
        ({"d2t": shifted(_19=99)}, {}, FormatError, "to 118, and the model has 61; choose"),
        ({"d2t": shifted(_0=-1)}, {}, FormatError, "d2t maps to tokens -1 to"),
        ({"d2t": shifted(_1=-1, _0=0)}, {}, FormatError, "d2t maps two tokens to one; choose"),
        ({"t2d": [True] * 61}, {}, FormatError, "t2d marks other tokens than d2t maps to; choose"),
        ({"t2d": [True] * 60}, {}, FormatError, "t2d has 60 tokens, and the model 61; choose"),
        ({"fc.weight": None}, {}, FormatError, "tensor fc.weight is missing; expected shape [32"),
        ({"fc.weight": np.zeros((32, 64), np.float32)}, {}, FormatError, "has shape [32, 64], exp"),
        (
            {"norm.weight": np.full(32, np.nan, np.float32)},
            {},
            FormatError,
            "tensor norm has a weight that is not finite; its training failed, so choose another",
        ),
        (
            {"lm_head.weight": np.full((20, 32), np.inf, np.float32)},
            {},
            FormatError,
            "tensor head has a weight that is not finite",
        ),
        (
            {"midlayer.extra.weight": np.zeros((2, 2), np.float32)},
            {},
            UnsupportedModelError,
            "layers.0.extra.weight is not a tensor of a eagle3 model",
        ),
        ({}, {"model_type": "gpt_oss"}, UnsupportedModelError, "model_type = gpt_oss is not supp"),
        ({}, {"norm_before_fc": True}, UnsupportedModelError, "norm_before_fc = True is not supp"),
        (
            {},
            {"speculators_model_type": "dflash"},
            UnsupportedModelError,
            "the folder has a DFlash drafter, whose block of draft tokens is computed at once",
        ),
        (
            {},
            {"speculators_model_type": "mlp"},
            UnsupportedModelError,
            "is 'mlp', and Headrace reads drafters of the kinds eagle and eagle3; choose an",
        ),
    ],
)
def test_eagle3_refusals(
    tmp_path: Path,
    tensors: dict[str, Any],
    config: dict[str, Any],
    error: type[HeadraceError],
    message: str,
) -> None:
    stored: dict[str, torch.Tensor | None] = {}
    for name, values in tensors.items():
        stored |= changed(name, values)
    folder = write_drafter(tmp_path / "drafter", DRAFTER, "authors", stored, **config)
    with pytest.raises(error) as raised:
        open_drafter(folder, TARGET)
    assert message in str(raised.value) and str(raised.value).count("\n") == 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, True),
        ({"speculators_model_type": "eagle3"}, True),
    ],
)
def test_eagle3_is_recognised_by_its_configuration(
    tmp_path: Path, config: dict[str, Any], expected: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_drafter(tmp_path) == expected
    assert not is_drafter(tmp_path / "config.json")
