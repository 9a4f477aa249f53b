"""Medusa heads in the layouts of their makers, against their equations in NumPy."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from headrace.backend_traits import BackendName
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.medusa import num_heads, read_heads
from headrace.config import KvConfig
from headrace.errors import FormatError, HeadraceError, ModelNotFoundError, UnsupportedModelError
from headrace.loader.drafts import DraftCheckpoints
from headrace.program.trace import trace
from headrace.speculation.proposers.medusa import _input_rows, head_forward
from tests.checkpoint.test_eagle3 import TARGET
from tests.folders import tiny_llama
from tests.tiny import tiny_executable

Floats = NDArray[np.float32]
SPEC = TARGET.spec
DIM, VOCAB, HEADS, BLOCKS = SPEC.dim, SPEC.vocab_size, 3, 2
LAYOUTS = {
    "authors": ("{i}.{j}.linear.{part}", "{i}.{n}.weight"),
    "authors, with the module's name": (
        "medusa_head.{i}.{j}.linear.{part}",
        "medusa_head.{i}.{n}.weight",
    ),
    "vllm": ("blocks.{i}.layers.{j}.{part}", "lm_heads.{i}.weight"),
    "vllm, with the module's name": (
        "medusa_heads.blocks.{i}.layers.{j}.{part}",
        "medusa_heads.lm_heads.{i}.weight",
    ),
    "blocks of a head": ("medusa_heads.{i}.blocks.{j}.linear.{part}", "lm_heads.{i}.weight"),
    "tensorrt-llm": (
        "medusa_heads.{i}.medusa_layers.{j}.linear.{part}",
        "medusa_heads.{i}.lm_head.weight",
    ),
    "one matrix of logits": ("blocks.{i}.layers.{j}.{part}", "lm_head.weight"),
    "the target's head": ("{i}.{j}.linear.{part}", ""),
}


def drawn(*shape: int, seed: int) -> Floats:
    values: Floats = np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)
    return values


def stored(layout: str, *, bias: bool, blocks: int = BLOCKS) -> dict[str, Floats]:
    """Tensors of random heads. Heads without matrices of their own have equal ones."""
    block_name, logits_name = LAYOUTS[layout]
    tensors = {}
    for i in range(HEADS):
        for j in range(blocks):
            name = partial(block_name.format, i=i, j=j)
            tensors[name(part="weight")] = drawn(DIM, DIM, seed=10 * i + j)
            if bias:
                tensors[name(part="bias")] = drawn(DIM, seed=100 + 10 * i + j)
        if logits_name:
            name = logits_name.format(i=i, n=blocks)
            tensors[name] = drawn(VOCAB, DIM, seed=0 if "{" not in logits_name else 200 + i)
    return tensors


def write(folder: Path, tensors: dict[str, Floats], **config: Any) -> Path:
    folder.mkdir()
    save_file(
        {name: torch.from_numpy(values) for name, values in tensors.items()},
        folder / "medusa_lm_head.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def twin(x: Floats, i: int, tensors: dict[str, Floats], layout: str, blocks: int) -> Floats:
    """The logits of head i for rows x, by the equations of the paper (section 2.1.1)."""
    block_name, logits_name = LAYOUTS[layout]
    for j in range(blocks):
        name = partial(block_name.format, i=i, j=j)
        y = x @ tensors[name(part="weight")].T + tensors.get(name(part="bias"), 0)
        x = x + y / (1 + np.exp(-y))
    out = TARGET.tensors["head"].dequantise()
    if logits_name:
        out = tensors[logits_name.format(i=i, n=blocks)]
    return x @ out.T


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks", [1, BLOCKS])
def test_medusa_layouts_compute_the_published_equations(
    tmp_path: Path, backend: BackendName, layout: str, bias: bool, blocks: int
) -> None:
    tensors = stored(layout, bias=bias, blocks=blocks)
    folder = write(tmp_path / "heads", tensors, medusa_num_heads=HEADS, medusa_num_layers=blocks)
    for path in (folder, folder / "medusa_lm_head.safetensors"):
        heads = read_heads(path, SPEC, VOCAB)
        assert num_heads(heads) == HEADS and len(heads) == len(tensors)

    x = drawn(4, DIM, seed=1)
    block_size = 32 if backend == "cpu" else 4
    target = tiny_executable((SPEC, dict(TARGET.tensors)), backend, KvConfig((8,), block_size))
    known = {**TARGET.tensors, **heads}
    for i in range(HEADS):
        program = trace(partial(head_forward, i, DIM, VOCAB), known)
        head = target.attach(program, known)
        logits = head.launch(_input_rows(x), logits=True).wait().logits
        want = twin(x, i, tensors, layout, blocks)
        np.testing.assert_allclose(logits, want, rtol=1e-3, atol=0.02 if backend == "cpu" else 1e-4)


@pytest.mark.parametrize("layout", ["authors", "one matrix of logits", "the target's head"])
def test_medusa_bytes_are_those_of_the_file(tmp_path: Path, layout: str) -> None:
    """A matrix of all heads counts once, and the target's head not at all."""
    tensors = stored(layout, bias=True)
    heads = read_heads(write(tmp_path / "heads", tensors), SPEC, VOCAB)
    nbytes = DraftCheckpoints(heads=heads).weight_bytes("reference", TARGET)
    assert nbytes == 8 * sum(values.size for values in tensors.values())


def test_medusa_heads_in_a_tuned_model(tmp_path: Path) -> None:
    """Medusa-2 trains heads with their model, and one folder has both."""
    tiny_llama(hidden=DIM).save_pretrained(tmp_path)
    plain = open_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    own = stored("authors, with the module's name", bias=True)
    heads = {name: torch.from_numpy(values) for name, values in own.items()}
    save_file(load_file(file) | heads, file)

    model = open_checkpoint(tmp_path)
    assert model.spec == plain.spec and model.tensors.keys() == plain.tensors.keys()
    assert set(model.left_out) == own.keys()
    assert "the folder has Medusa heads; set medusa_heads to the folder" in model.notes[0]
    assert num_heads(read_heads(tmp_path, SPEC, VOCAB)) == HEADS


def test_medusa_heads_of_another_model_name_it(tmp_path: Path) -> None:
    wrong = stored("vllm", bias=True) | {"lm_heads.1.weight": drawn(VOCAB, DIM + 2, seed=5)}
    folder = write(tmp_path / "heads", wrong, base_model_name_or_path="org/other")
    with pytest.raises(FormatError) as error:
        read_heads(folder, SPEC, VOCAB)
    assert str(error.value) == (
        f"heads: tensor 1.2.weight has shape [{VOCAB}, {DIM + 2}], but this model needs "
        f"[{VOCAB}, {DIM}]; choose heads that were trained for this model: these are for org/other"
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"token_map": drawn(VOCAB, seed=0)}, "missing or unknown tensors token_map; choose"),
        ({"1.2.weight": None}, "missing or unknown tensors 1.2.weight; choose"),
        ({"1.1.linear.weight": None}, "missing or unknown tensors 1.1.linear.weight; choose"),
        ({"9.2.weight": drawn(VOCAB, DIM, seed=0)}, "tensors 3.0.linear.bias, 3.0.linear.weight, "),
        ({"9999999999.2.weight": drawn(VOCAB, DIM, seed=0)}, "tensors 9999999999.2.weight; choose"),
        ({"0.9999999999.linear.weight": drawn(2, seed=0)}, "tensors 0.9999999999.linear.weight; c"),
        (
            {"0.9999.linear.weight": drawn(2, seed=0)},
            "not Medusa heads: missing or unknown tensors",
        ),
        ({"99.0.linear.weight": drawn(DIM, DIM, seed=0)}, "not Medusa heads: missing or unknown"),
        ({"2.7.weight": drawn(VOCAB, DIM, seed=0)}, "missing or unknown tensors 2.7.weight; choos"),
    ],
)
def test_incomplete_medusa_heads_raise(
    tmp_path: Path, tensors: dict[str, Floats | None], message: str
) -> None:
    all_tensors = stored("authors", bias=True) | tensors
    given = {name: each for name, each in all_tensors.items() if each is not None}
    with pytest.raises(FormatError) as error:
        read_heads(write(tmp_path / "heads", given), SPEC, VOCAB)
    assert message in str(error.value)


@pytest.mark.parametrize("as_folder", [True, False])
def test_medusa_pickles_are_refused(tmp_path: Path, as_folder: bool) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    torch.save({"0.0.linear.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(UnsupportedModelError) as error:
        read_heads(tmp_path if as_folder else file, SPEC, VOCAB)
    assert "medusa_lm_head.pt" in str(error.value) and "is a pickle" in str(error.value)
    assert "safetensors.torch.save_file(torch.load(FILE, weights_only=True)" in str(error.value)


def test_medusa_heads_that_do_not_exist_raise(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="none' is not a file or folder; set the path of"):
        read_heads(tmp_path / "none", SPEC, VOCAB)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HeadraceError, match="no safetensors file"):
        read_heads(tmp_path / "empty", SPEC, VOCAB)
