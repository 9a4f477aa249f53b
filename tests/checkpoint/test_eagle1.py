"""EAGLE-1 and -2 drafters in the layouts of their makers, and folders that are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.checkpoint.drafters import is_drafter, open_drafter
from headrace.errors import FormatError, HeadraceError, RequestError, UnsupportedModelError
from tests.checkpoint.test_eagle3 import MODEL, TARGET
from tests.drafters import random_eagle1, write_eagle1

LAYOUTS = ("authors", "vllm", "speculators")
DRAFTER = random_eagle1(MODEL)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fuse_bias", [True, False])
def test_eagle1_layouts_give_the_same_drafter(tmp_path: Path, layout: str, fuse_bias: bool) -> None:
    drafter = random_eagle1(MODEL, fuse_bias=fuse_bias)
    folder = write_eagle1(tmp_path / "drafter", drafter, layout)
    assert is_drafter(folder)
    found = open_drafter(folder, TARGET)
    assert found.spec.drafter == drafter.spec.drafter and found.tokens is None
    assert found.tensors.keys() == drafter.tensors.keys()
    for name, tensor in drafter.tensors.items():
        np.testing.assert_array_equal(found.tensors[name].dequantise(), tensor.dequantise())


def test_eagle1_borrows_what_its_files_lack(tmp_path: Path) -> None:
    found = open_drafter(write_eagle1(tmp_path / "a", DRAFTER, "authors"), TARGET)
    for name, of_target in {"embed": "embed", "head": "head", "target_norm": "norm"}.items():
        assert found.tensors[name] is TARGET.tensors[of_target]
    own = torch.ones(MODEL[0].vocab_size, MODEL[0].dim)
    folder = write_eagle1(
        tmp_path / "b", DRAFTER, "authors", {"embed_tokens.weight": own, "lm_head.weight": own * 2}
    )
    found = open_drafter(folder, TARGET)
    assert found.tensors["embed"].dequantise().max() == 1
    assert found.tensors["head"].dequantise().min() == 2


@pytest.mark.parametrize(
    ("tensors", "config", "error", "message"),
    [
        ({}, {"hidden_size": 64}, RequestError, "hidden size 64, and this model's is 32; choose"),
        ({}, {"vocab_size": 99}, RequestError, "vocabulary size 99, and this model's is 61; cho"),
        ({}, {"model_type": "mixtral"}, UnsupportedModelError, "model_type = mixtral is not supp"),
        ({}, {"layernorms": True}, UnsupportedModelError, "layernorms = True is not supported"),
        (
            {"layers.0.mlp.up_proj.weight": None},
            {},
            FormatError,
            "tensor layers.0.mlp.up_proj.weight is missing; expected shape [48, 32]",
        ),
        (
            {"fc.weight": torch.full((32, 64), torch.nan)},
            {},
            FormatError,
            "tensor fuse has a weight that is not finite; its training failed",
        ),
        (
            {"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)},
            {},
            UnsupportedModelError,
            "layers.1.mlp.up_proj.weight is not a tensor of a eagle1 model",
        ),
        (
            {"embed_tokens.weight": torch.zeros(60, 32)},
            {},
            FormatError,
            "tensor embed_tokens.weight has shape [60, 32], expected [61, 32]",
        ),
    ],
)
def test_eagle1_refusals(
    tmp_path: Path,
    tensors: dict[str, Any],
    config: dict[str, Any],
    error: type[HeadraceError],
    message: str,
) -> None:
    folder = write_eagle1(tmp_path / "drafter", DRAFTER, "authors", tensors, **config)
    with pytest.raises(error) as raised:
        open_drafter(folder, TARGET)
    assert message in str(raised.value) and str(raised.value).count("\n") == 0


def test_eagle1_needs_a_root_mean_square_norm(tmp_path: Path) -> None:
    folder = write_eagle1(tmp_path / "drafter", DRAFTER, "authors")
    with pytest.raises(RequestError, match="reads rows after the root mean square norm of its m"):
        open_drafter(folder, replace(TARGET, spec=replace(TARGET.spec, norm="layer")))


def test_dflash_drafters_are_refused_with_the_reason(tmp_path: Path) -> None:
    config = {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_drafter(tmp_path)
    with pytest.raises(UnsupportedModelError) as raised:
        open_drafter(tmp_path, TARGET)
    assert "the folder has a DFlash drafter" in str(raised.value)
    assert "attention in both directions; attention here is causal, so choose" in str(raised.value)
