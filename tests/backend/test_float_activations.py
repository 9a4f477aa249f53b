"""Quantised weights times float32 activations, in every instruction set and format."""

from functools import partial
from operator import sub
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace import LLM, SamplingParams, _native
from headrace.backend import compile_program, forward
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.quant.formats import FORMATS, StoredTensor
from tests.backend.batches import Sequence, batch_of
from tests.backend.stored import random_stored
from tests.backend.test_table_formats import product as table_product
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture
from tests.tables import KINDS, random_table
from tests.tiny import tiny_model

GROUPED = [name for name, form in FORMATS.items() if form.block > 1]
ISAS = _native.isas()
Array = NDArray[Any]


def stored(name: str, rows: int, cols: int, seed: int) -> StoredTensor:
    return (
        random_stored(name, rows, cols, seed)
        if name in FORMATS
        else random_table(name, rows, cols, seed)
    )


product = partial(table_product, float_activations=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [*GROUPED, *KINDS])
def test_float_activation_products(isa: str, name: str) -> None:
    for seed, (num_rows, rows, offset) in enumerate(
        ((1, 17, False), (7, 40, True), (20, 16, False))
    ):
        x = np.random.default_rng(seed).standard_normal((num_rows, 512)).astype(np.float32)
        weight = stored(name, rows, 512, seed)
        values = weight.dequantise().astype(np.float64)
        error = np.abs(product(isa, weight, x, offset) - x @ values.T)
        assert np.all(
            error
            <= 4e-6 * (np.abs(x) @ np.abs(values).T) + 1e-6 * np.abs(x).sum(axis=1, keepdims=True)
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "name",
    ["Q4_0", "Q4_K", "Q6_K", "MXFP4", "IQ1_M", "IQ3_S", "IQ4_XS", "int3-point", "nf4", "e5m2-row"],
)
def test_float_activation_bits_of_a_row_do_not_depend_on_other_rows(isa: str, name: str) -> None:
    x = np.random.default_rng(1).standard_normal((37, 256)).astype(np.float32)
    weight = stored(name, 50, 256, 2)
    whole = product(isa, weight, x, False, threads=2)
    for first, last in ((0, 1), (3, 20), (30, 37)):
        assert np.array_equal(whole[first:last], product(isa, weight, x[first:last], False))


@pytest.mark.parametrize("format", ["Q4_0", "Q8_0"])
def test_float_activations_reduce_the_error_of_a_model(format: str) -> None:
    """Fused ops with every matrix in the format, compared with the reference backend."""
    spec, tensors = tiny_model(2, dim=64, heads=4, kv_heads=2, ffn=96, vocab=61, format=format)
    program = trace_model(spec, tensors)
    kv = KvConfig((4,), dtype="f32")
    batch = batch_of(
        [Sequence(list(range(4)), kv.block_size)], [list(range(40))], [([], [])], False
    )
    truth = forward(compile_program("reference", program, tensors, kv, 1), batch).logits
    assert truth is not None
    errors = {}
    for activations in ("int8", "f32"):
        logits = forward(compile_program("cpu", program, tensors, kv, 2, activations), batch).logits
        assert logits is not None
        errors[activations] = float(np.abs(logits - truth).max())
    assert errors["f32"] < 1e-4 * np.abs(truth).max() and errors["f32"] < 0.1 * errors["int8"]


def test_float_activations_do_not_change_int8_by_row() -> None:
    weight = random_stored("I8_ROW", 32, 64, 0)
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    values = weight.dequantise().astype(np.float64)
    assert (
        1e-4
        < np.abs(product("", weight, x) - x @ values.T).max()
        < 0.05 * np.abs(x @ values.T).max()
    )


def test_float_activations_reduce_the_error_in_llm(write_gguf: Any) -> None:  # noqa: F811
    model = str(write_gguf(kind="Q8_0"))

    def logprobs(**options: Any) -> list[float]:
        with LLM(model, max_model_len=64, kv_dtype="f32", **options) as llm:
            (result,) = llm.generate(
                "hello w", SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            )
            assert result.prompt_logprobs
            return [next(iter(found.values())).logprob for found in result.prompt_logprobs if found]

    truth = logprobs(backend="reference")
    errors = {
        activations: max(map(abs, map(sub, truth, logprobs(activations=activations))))
        for activations in ("int8", "f32")
    }
    assert errors["f32"] < errors["int8"] / 10
