"""The GPU backend with other features: draft models, adapters, pooling, grammars, mixed
weight formats.
"""

from typing import Any

import numpy as np
import pytest

from headrace.backend import compile_program, forward
from headrace.backend.cuda import compile
from headrace.backend.reference.executable import ReferenceExecutable
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.request import PoolingParams
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputs
from tests.backend.batches import Sequence, batch_of
from tests.backend.stored import random_stored
from tests.backend.test_adapters import KV, SPEC, TENSORS, logits, made
from tests.draft_engines import draft_engine
from tests.engine.test_pooling import embed, results_of, vector_of
from tests.engine.test_promise import Ask, same
from tests.tiny import Tensors, run_all, tiny_engine, tiny_model

MODEL = tiny_model(0)
ASKS: list[Ask] = [
    ([7, 8, 9, 7, 8, 9], SamplingParams(temperature=0, max_tokens=7, logprobs=1)),
    ([5, 4, 3], SamplingParams(seed=2, max_tokens=6, logprobs=0)),
]


@pytest.mark.parametrize("how", ["draft_model", "self_draft", "medusa"])
def test_draft_models_change_no_token(how: str) -> None:
    alone = [run_all(tiny_engine(MODEL, "cuda", kv_dtype="f32"), [ask])[0] for ask in ASKS]
    engine, _ = draft_engine(MODEL, how, "cuda", depth=2, width=2 if how == "draft_model" else 1)
    for one, other in zip(run_all(engine, ASKS), alone, strict=True):
        same(one, other, exact=True)
    assert engine.stats().drafted > 0 and engine.stats().proposer_failures == 0


def test_adapters_of_rows_in_one_step() -> None:
    program = trace_model(SPEC, TENSORS)
    ours, truth = compile(program, TENSORS, KV, 1, "f32"), ReferenceExecutable(program, TENSORS, KV)
    base = logits(ours, [-1] * 4)
    for rank in (1, 5, 33):
        assert ours.add_adapter(made(rank)) == truth.add_adapter(made(rank))
    for numbers in ([0, 1, 2, 0], [2, -1, 0, 2]):
        got, want = logits(ours, numbers), logits(truth, numbers)
        assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
    one, other = logits(ours, [-1, 2, -1, 1]), logits(ours, [0, 2, 0, 1])
    assert (one[:2] == base[:2]).all() and (one[[2, 5]] == other[[2, 5]]).all(), (
        "whatever the others have"
    )
    ours.remove_adapter(1)
    assert ours.add_adapter(made(16)) == 1


def test_pooling() -> None:
    """Results do not depend on how prompts are cut."""
    how, vectors = PoolingParams(pooling="mean"), []
    for backend, rows in (("cuda", 64), ("cuda", 3), ("reference", 64)):
        engine = tiny_engine(
            MODEL, backend, kv_dtype="f32", activations="f32", max_num_batched_tokens=rows
        )
        ids = [embed(engine, prompt, how) for prompt in ([1, 2, 3, 4, 5, 6, 7], [9], [8, 8, 8])]
        results = results_of(engine)
        vectors.append(np.stack([vector_of(results[one]) for one in ids]))
    assert (vectors[0] == vectors[1]).all() and np.allclose(vectors[0], vectors[2], atol=1e-4)


def test_a_grammar_is_a_mask_on_the_device() -> None:
    ask = [
        (
            [3, 4],
            SamplingParams(
                seed=1, max_tokens=6, structured_outputs=StructuredOutputs(regex="[a-c]{2,5}")
            ),
        )
    ]
    results = [
        run_all(
            tiny_engine(
                tiny_model(0, vocab=61), backend, eos_ids=(60,), kv_dtype="f32", activations="f32"
            ),
            ask,
        )[0]
        for backend in ("cuda", "reference")
    ]
    assert results[0].outputs[0].token_ids == results[1].outputs[0].token_ids
    assert set(results[0].outputs[0].text) <= set("abc")


def mixed_model() -> tuple[Any, Tensors]:
    """Matrices that one op reads together have different formats, as in GGUF files."""
    spec, tensors = tiny_model(1, dim=256, heads=4, kv_heads=2, ffn=256, layers=1)
    formats = {
        "q": "Q4_K",
        "k": "Q4_K",
        "v": "Q6_K",
        "gate": "Q4_0",
        "up": "Q5_K",
        "down": "Q3_K",
        "o": "F16",
        "head": "Q8_0",
    }
    for name, tensor in tensors.items():
        if (kind := name.rpartition(".")[2]) in formats and len(tensor.shape) == 2:
            tensors[name] = random_stored(
                formats[kind], *tensor.shape, seed=3, name=name, scale=0.1
            )
    return spec, tensors


@pytest.mark.parametrize(("activations", "gap"), [("f32", 1e-5), ("int8", 0.02)])
def test_matrices_of_one_op_in_several_formats(activations: Any, gap: float) -> None:
    spec, tensors = mixed_model()
    program = trace_model(spec, tensors)
    batch = batch_of(
        [Sequence([1, 0], 32), Sequence([2], 32)],
        [[1, 2, 3], [5]],
        [([], []), ([7, 8], [-1, -1])],
        True,
    )
    kv = KvConfig((4,), 32, "f32")
    got, want = (
        forward(compile_program(backend, program, tensors, kv, 1, activations), batch).logits
        for backend in ("cuda", "reference")
    )
    assert np.linalg.norm(got - want) < gap * np.linalg.norm(want)
