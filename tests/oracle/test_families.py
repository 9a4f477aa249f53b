"""Tiny random models of every family: the logits of the reference backend against those of transformers in float32, and of cpu."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from headrace.backend import compile_program
from headrace.checkpoint.load import open_checkpoint
from headrace.config import KvConfig
from headrace.logit_ops import Pool, Pooled
from headrace.model import FAMILIES, trace_model
from headrace.sampling.pooling import RowSum
from tests.backend.batches import Sequence, batch_of
from tests.families import VARIANTS, VOCAB, hidden_of, logits_of, save_model

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 120).tolist()


Rows = NDArray[np.float32]


def our_rows(folder: Path, tokens: list[int], kv_groups: int, context: int, backend: str = "reference") -> tuple[Rows, Rows]:
    """Logits [tokens, vocab] and what they are computed from [tokens, dim]: the pooled rows."""
    checkpoint = open_checkpoint(folder)
    program = trace_model(replace(checkpoint.spec, context=context), checkpoint.tensors).pooling()
    assert len(program.kv_groups) == kv_groups
    blocks = [*range(0, 10, 2), *range(9, 0, -2)]
    executable = compile_program(backend, program, checkpoint.tensors, KvConfig((10,) * kv_groups, 32, "f32"), 1)
    batch = batch_of([Sequence(blocks, 32)], [tokens], [([], [])], False, kv_groups)
    batch = batch._replace(pooled_rows=batch.logit_rows)
    result = executable.launch(batch, [Pool(row, 1, RowSum()) for row in range(len(tokens))], logits=True).wait()
    assert result.logits is not None
    return result.logits, np.array([pooled.total for pooled in result.values if isinstance(pooled, Pooled)], np.float32)


def our_logits(folder: Path, tokens: list[int], kv_groups: int, context: int) -> Rows:
    return our_rows(folder, tokens, kv_groups, context)[0]


def near(got: Rows, want: Rows) -> bool:
    return got.shape == want.shape and bool(np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want))


def test_every_family_is_here() -> None:
    assert {variant.family for variant in VARIANTS.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_hidden_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    got, hidden = our_rows(tmp_path, TOKENS, VARIANTS[name].kv_groups, 256)
    assert near(got, logits_of(model, TOKENS)) and near(hidden, hidden_of(model, TOKENS))
    fast, fast_hidden = our_rows(tmp_path, TOKENS, VARIANTS[name].kv_groups, 256, "cpu")
    assert near(fast, got) and near(fast_hidden, hidden)


def test_gpt2_as_it_was_first_published(tmp_path: Path) -> None:
    """Names without a prefix, and masks among the weights."""
    want = logits_of(save_model("gpt2", tmp_path), TOKENS)
    tensors = {name.removeprefix("transformer."): values for name, values in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}, tmp_path / "model.safetensors")
    got = our_logits(tmp_path, TOKENS, 1, 256)
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)


@pytest.mark.parametrize(("context", "length"), [(64, 60), (256, 120)])
def test_longrope_goes_by_the_longest_text_that_is_allowed(context: int, length: int, tmp_path: Path) -> None:
    """Transformers goes by the text at hand: a short one has the short factors, a long one the long ones."""
    want = logits_of(save_model("phi3-longrope", tmp_path), TOKENS[:length])
    got = our_logits(tmp_path, TOKENS[:length], 1, context)
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
    other = our_logits(tmp_path, TOKENS[:length], 1, 320 - context)
    assert np.linalg.norm(other - want) > 0.01 * np.linalg.norm(want)


def test_a_dynamic_base_goes_by_the_longest_text_that_is_allowed(tmp_path: Path) -> None:
    """Transformers goes by the text at hand, once it is longer than those of the training."""
    want = logits_of(save_model("llama-dynamic", tmp_path), TOKENS * 2 + TOKENS[:60])
    got = our_logits(tmp_path, TOKENS * 2 + TOKENS[:60], 1, 300)
    assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
    assert open_checkpoint(tmp_path).spec.max_context == 4 * 256
