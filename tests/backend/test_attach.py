"""Attached programs compute the same numbers as alone, and share weights, KV and threads."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.backend import compile_program, forward
from headrace.backend_traits import KvDtype
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.quant.formats import StoredTensor
from tests.backend.test_cpu_program import BLOCKS, random_steps
from tests.tiny import tiny_model

KV = KvConfig((BLOCKS,), 32, "f32")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("format", ["F32", "Q4_0"])
@pytest.mark.parametrize("kv_dtype", ["f32", "int8", "int4", "k8v4"])
def test_attached_first_layers_share_the_kv(backend: str, format: str, kv_dtype: KvDtype) -> None:
    """They use the KV of the whole program, and may have another order of KV groups."""
    kv = KvConfig((BLOCKS, BLOCKS), 32, kv_dtype)
    spec, tensors = tiny_model(7, layers=4, format=format, window=(0, 9, 9))
    short_spec = replace(spec, num_layers=2, windows=spec.windows[:2])
    whole = compile_program(backend, trace_model(spec, tensors), tensors, kv, 1)
    short = whole.attach(trace_model(short_spec, tensors), tensors)
    alone = compile_program(backend, trace_model(short_spec, tensors), tensors, kv, 1)
    for i, batch in enumerate(
        random_steps(np.random.default_rng(0), spec.vocab_size, trees=True, num_groups=2)
    ):
        expected = forward(alone, batch).logits.copy()
        if i % 2:
            assert np.array_equal(forward(short, batch).logits, expected)
        before = forward(whole, batch).logits.copy()
        assert np.array_equal(forward(short, batch).logits, expected)
        assert np.array_equal(forward(whole, batch).logits, before)


def test_attached_programs_share_weights() -> None:
    spec, tensors = tiny_model(7, layers=3)
    whole = compile_program("cpu", trace_model(spec, tensors), tensors, KV, 1)
    before = whole.plan.weight_bytes  # type: ignore[attr-defined]
    short = whole.attach(
        trace_model(replace(spec, num_layers=1), tensors), dict[str, StoredTensor]()
    )
    assert short.plan is whole.plan and whole.plan.weight_bytes == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_hidden_rows_are_the_rows_before_the_head(backend: str) -> None:
    spec, tensors = tiny_model(8)
    program = trace_model(spec, tensors)
    plain, keeping = (
        compile_program(backend, p, tensors, KV, 1) for p in (program, program.with_hidden())
    )
    for batch in random_steps(np.random.default_rng(1), spec.vocab_size, trees=False):
        rows = forward(keeping, batch)
        assert rows.hidden is not None and rows.hidden.shape == (len(batch.logit_rows), spec.dim)
        expected = forward(plain, batch)
        assert expected.hidden is None and np.array_equal(rows.logits, expected.logits)
        np.testing.assert_allclose(
            rows.hidden @ tensors["head"].dequantise().T, rows.logits, rtol=0.02, atol=0.1
        )


def test_input_rows_without_an_input_op_are_refused() -> None:
    spec, tensors = tiny_model(8)
    whole = compile_program("cpu", trace_model(spec, tensors), tensors, KV, 1)
    batch = next(iter(random_steps(np.random.default_rng(1), spec.vocab_size, trees=False)))
    with pytest.raises(ValueError, match="has input rows, or none"):
        forward(whole, batch._replace(inputs=np.zeros((len(batch.tokens), spec.dim), np.float32)))
