"""Tiny random models of every family: logits of the reference backend against
transformers in float32, and of cpu.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from headrace.backend import compile_program
from headrace.checkpoint.load import open_checkpoint
from headrace.config import KvConfig
from headrace.logit_ops import Pool, Pooled
from headrace.model import FAMILIES, trace_model
from headrace.model.spec import ModelSpec
from headrace.sampling.pooling import RowSum
from tests.backend.batches import Sequence, batch_of
from tests.families import VARIANTS, VOCAB, hidden_of, logits_of, save_model
from tests.tiny import Tensors

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 120).tolist()


Rows = NDArray[np.float32]


def our_rows(
    folder: Path, tokens: list[int], kv_groups: int, context: int, backend: str = "reference"
) -> tuple[Rows, Rows]:
    """Logits [tokens, vocab] and their inputs [tokens, dim], which pooling uses."""
    checkpoint = open_checkpoint(folder)
    return rows_of_ours(
        replace(checkpoint.spec, context=context), checkpoint.tensors, tokens, kv_groups, backend
    )


def rows_of_ours(
    spec: ModelSpec, tensors: Tensors, tokens: list[int], kv_groups: int, backend: str
) -> tuple[Rows, Rows]:
    program = trace_model(spec, tensors).with_pooled()
    assert len(program.kv_groups) == kv_groups
    blocks = [*range(0, 10, 2), *range(9, 0, -2)]
    executable = compile_program(
        backend, program, tensors, KvConfig((10,) * kv_groups, 32, "f32"), 1
    )
    batch = batch_of([Sequence(blocks, 32)], [tokens], [([], [])], False, kv_groups)
    batch = batch._replace(pooled_rows=batch.logit_rows)
    result = executable.launch(
        batch, [Pool(row, 1, RowSum()) for row in range(len(tokens))], logits=True
    ).wait()
    assert result.logits is not None
    return result.logits, np.array(
        [pooled.total for pooled in result.values if isinstance(pooled, Pooled)], np.float32
    )


def our_logits(
    folder: Path, tokens: list[int], kv_groups: int, context: int, backend: str = "reference"
) -> Rows:
    return our_rows(folder, tokens, kv_groups, context, backend)[0]


def near(got: Rows, want: Rows) -> bool:
    return got.shape == want.shape and bool(
        np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
    )


def test_every_family_is_here() -> None:
    assert {variant.family for variant in VARIANTS.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_hidden_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    got, hidden = our_rows(tmp_path, TOKENS, VARIANTS[name].kv_groups, 256)
    assert near(got, logits_of(model, TOKENS)) and near(hidden, hidden_of(model, TOKENS))
    fast, fast_hidden = our_rows(tmp_path, TOKENS, VARIANTS[name].kv_groups, 256, "cpu")
    assert near(fast, got) and near(fast_hidden, hidden)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite"])
def test_latent_rows_in_the_absorbed_form(name: str, tmp_path: Path) -> None:
    """Latent rows as keys and values give the same logits."""
    want = logits_of(save_model(name, tmp_path), TOKENS)
    plain, absorbed = open_checkpoint(tmp_path), open_checkpoint(tmp_path, is_absorbed=True)
    numbers = [
        trace_model(each.spec, each.tensors).kv_groups[0].numbers for each in (plain, absorbed)
    ]
    assert numbers == [3 * 4 * (24 + 12), 3 * (40 + 8)]
    for backend in ("reference", "cpu"):
        got, _ = rows_of_ours(absorbed.spec, absorbed.tensors, TOKENS, 1, backend)
        assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)


FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Experts in MXFP4; transformers has their values as floats."""
    model, rng = save_model("gpt-oss", tmp_path), np.random.default_rng(0)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, cols, rows = tensors.pop(name).shape
        codes = rng.integers(0, 16, (experts, rows, cols // 32, 32), dtype=np.uint8)
        scales = rng.integers(119, 124, codes.shape[:3], dtype=np.uint8)
        values = np.ldexp(FLOAT4[codes], scales.astype(int)[..., None] - 127).reshape(
            experts, rows, cols
        )
        model.get_parameter(name).data = torch.tensor(values, dtype=torch.float32).swapaxes(1, 2)
        tensors |= {
            f"{name}_blocks": codes[..., ::2] | (codes[..., 1::2] << np.uint8(4)),
            f"{name}_scales": scales,
        }
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    want = logits_of(model, TOKENS)
    got = our_logits(tmp_path, TOKENS, 2, 256)
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
    fast = our_logits(tmp_path, TOKENS, 2, 256, "cpu")
    assert np.linalg.norm(fast - got) < 0.03 * np.linalg.norm(got)  # int8 activations
    experts = [
        tensor
        for name, tensor in open_checkpoint(tmp_path).tensors.items()
        if ".experts." in name and tensor.rows > 1
    ]
    assert {tensor.format.name for tensor in experts} == {"MXFP4_PAIRS"}


def test_gpt2_as_it_was_first_published(tmp_path: Path) -> None:
    """Names without a prefix, and masks among the weights."""
    want = logits_of(save_model("gpt2", tmp_path), TOKENS)
    tensors = {
        name.removeprefix("transformer."): values
        for name, values in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(
        tensors | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)},
        tmp_path / "model.safetensors",
    )
    got = our_logits(tmp_path, TOKENS, 1, 256)
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)


@pytest.mark.parametrize(("context", "length"), [(64, 60), (256, 120)])
def test_longrope_goes_by_the_longest_text_that_is_allowed(
    context: int, length: int, tmp_path: Path
) -> None:
    """transformers chooses short or long factors by the text at hand."""
    want = logits_of(save_model("phi3-longrope", tmp_path), TOKENS[:length])
    got = our_logits(tmp_path, TOKENS[:length], 1, context)
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
    other = our_logits(tmp_path, TOKENS[:length], 1, 320 - context)
    assert np.linalg.norm(other - want) > 0.01 * np.linalg.norm(want)


def test_a_dynamic_base_goes_by_the_longest_text_that_is_allowed(tmp_path: Path) -> None:
    """transformers uses the text at hand, beyond the length of training."""
    want = logits_of(save_model("llama-dynamic", tmp_path), TOKENS * 2 + TOKENS[:60])
    got = our_logits(tmp_path, TOKENS * 2 + TOKENS[:60], 1, 300)
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
    assert open_checkpoint(tmp_path).spec.max_context == 4 * 256
