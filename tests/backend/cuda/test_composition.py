"""The GPU backend with other features: draft models, adapters, pooling, grammars, mixed
weight formats.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.backend import compile_program, forward
from headrace.backend.cuda import adapters, compile, executable
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.stream import HostStream
from headrace.backend.reference.executable import ReferenceExecutable
from headrace.config import KvConfig
from headrace.errors import MemoryLimitError, UnsupportedModelError
from headrace.model import tensor_shapes, trace_model
from headrace.model.spec import EarlyExit
from headrace.program.adapter import LowRank, OwnWeight, TokenRows
from headrace.quant.formats import StoredTensor
from headrace.request import PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputs
from tests.backend.batches import Sequence, batch_of
from tests.backend.cuda.late import LateStream
from tests.backend.stored import random_stored
from tests.backend.test_adapters import KV, SPEC, TENSORS, batch, logits, made
from tests.draft_engines import draft_engine
from tests.engine.test_pooling import embed, results_of, vector_of
from tests.engine.test_promise import Ask, same
from tests.tiny import Tensors, drain, run_all, tiny_engine, tiny_model

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


def test_early_exits_are_the_same_with_drafts() -> None:
    """Every draft of the first layers is right, because clear rows are theirs."""
    spec, tensors = MODEL
    model = replace(spec, early_exit=EarlyExit(1, 0.05)), tensors
    alone = [run_all(tiny_engine(model, "cuda", kv_dtype="f32"), [ask])[0] for ask in ASKS]
    engine, _ = draft_engine(model, "self_draft", "cuda", depth=3)
    for one, other in zip(run_all(engine, ASKS), alone, strict=True):
        same(one, other, exact=True)
    stats = engine.stats()
    assert stats.accepted == stats.drafted > 0 and stats.proposer_failures == 0


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


def own_weights(seed: int) -> dict[str, LowRank | OwnWeight]:
    """Low-rank matrices, and weights of the adapter's own of every kind."""
    rng, changes = np.random.default_rng(seed), dict(made(4))
    shapes = tensor_shapes(SPEC)

    def random(*shape: int) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) / 3).astype(np.float32)

    name, low_rank = next((name, change) for name, change in changes.items() if "gate" in name)
    assert isinstance(low_rank, LowRank)
    changes[name] = OwnWeight(delta=low_rank, row_norms=1 + np.abs(random(shapes[name][0])))
    changes["layers.0.q"] = OwnWeight(
        values=StoredTensor.from_floats("q", random(*shapes["layers.0.q"]))
    )
    changes["embed"] = OwnWeight(rows=TokenRows(np.array([3, 7]), random(2, SPEC.dim)))
    changes["layers.0.mlp_norm"] = OwnWeight(added=random(SPEC.dim))
    changes["layers.1.o_bias"] = OwnWeight(added=random(SPEC.dim))
    return changes


def test_adapters_with_weights_of_their_own() -> None:
    program = trace_model(SPEC, TENSORS)
    ours, truth = compile(program, TENSORS, KV, 1, "f32"), ReferenceExecutable(program, TENSORS, KV)
    base = logits(ours, [-1] * 4)
    for adapter in (own_weights(1), made(5), own_weights(2)):
        assert ours.add_adapter(adapter) == truth.add_adapter(adapter)
    mixed = logits(ours, [2, -1, 0, 1])
    for numbers, got in (([2, -1, 0, 1], mixed), ([0] * 4, logits(ours, [0] * 4))):
        want = logits(truth, numbers)
        assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)
    seq_of = batch([-1] * 4).seq_of
    assert (mixed[seq_of == 1] == base[seq_of == 1]).all()
    ours.remove_adapter(2)
    assert ours.add_adapter(own_weights(3)) == 2
    with pytest.raises(UnsupportedModelError, match="which the model does not use"):
        ours.add_adapter({"layers.7.mlp_norm": OwnWeight(added=np.ones(32, np.float32))})
    assert ours.add_adapter(made(2)) == 3, "the refused adapter has no number"


def run_with(asks: list[Ask], names: list[str | None], stream: HostStream) -> list[Any]:
    program = trace_model(SPEC, TENSORS)
    kv = KvConfig((20,), 4, "bf16")
    executable = CudaExecutable(program, TENSORS, kv, torch.bfloat16, stream)
    engine = tiny_engine(
        (SPEC, TENSORS), "cuda", executable=executable, slots=80, multi_step_ms=1e6
    )
    engine.load_adapter("own", own_weights(1))
    engine.load_adapter("other", made(5))
    ids = [
        engine.add_request(*ask, options=RequestOptions(adapter=name))
        for ask, name in zip(asks, names, strict=True)
    ]
    results = {update.request_id: update.result for update in drain(engine) if update.result}
    return [results[id] for id in ids]


def test_engine_with_weights_of_an_adapter() -> None:
    """Sampling on a late device, whose launches are in flight."""
    late = LateStream()
    short = SamplingParams(seed=2, max_tokens=3, logprobs=0)
    asks: list[Ask] = [([7, 8, 9, 7], short), ([7, 8, 9, 7], short)]
    own, other = run_with(asks, ["own", "other"], late)
    assert late.late > 10
    same(own, run_with(asks[:1], ["own"], HostStream())[0], exact=True)
    assert own.outputs[0].logprobs != other.outputs[0].logprobs


def test_steps_with_adapters_meet_only_kernels_that_their_load_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A low-rank adapter, one of a larger rank, and one with weights of its own."""
    prepared: list[Launch] = []
    run: list[Launch] = []
    runs = LateStream.run
    monkeypatch.setattr(executable, "compile_kernels", lambda launches: prepared.extend(launches))
    monkeypatch.setattr(LateStream, "run", lambda self, ls: (run.extend(ls), runs(self, ls)))
    launched = CudaExecutable(
        trace_model(SPEC, TENSORS),
        TENSORS,
        KvConfig((20,), 4, "bf16"),
        torch.bfloat16,
        LateStream(),
    )
    launched.prepare(24, 4)
    engine = tiny_engine((SPEC, TENSORS), "cuda", executable=launched, slots=80)
    for adapter in (made(4), made(40), own_weights(1)):
        engine.load_adapter("adapter", adapter)
        options = RequestOptions(adapter="adapter")
        engine.add_request([5, 4, 3], SamplingParams(seed=2, max_tokens=2), options=options)
        drain(engine)
        engine.unload_adapter("adapter")
        unknown = {kind_of(launch) for launch in run} - {kind_of(launch) for launch in prepared}
        assert not unknown
    assert "lora_up_kernel" in {launch.name for launch in run}


def kind_of(launch: Launch) -> str:
    return f"{launch.name} {launch.constants}"


def test_an_adapter_without_memory_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its matrices nor its number, whether they or the kernels' memory do not fit."""
    launched = compile(trace_model(SPEC, TENSORS), TENSORS, KV, 1)
    base = launched.add_adapter(made(4))
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    copies = adapters.stored
    done = []

    def fails(*args: Any) -> Any:
        done.append(args)
        if len(done) == 3:
            raise full
        return copies(*args)

    with monkeypatch.context() as patch:
        patch.setattr(adapters, "stored", fails)
        with pytest.raises(MemoryLimitError, match="the GPU is out of memory"):
            launched.add_adapter(made(5))
    with monkeypatch.context() as patch:
        patch.setattr(executable, "compile_kernels", lambda launches: fails())
        done[:] = [0, 0]
        with pytest.raises(MemoryLimitError, match="the GPU is out of memory"):
            launched.add_adapter(made(40))
    assert list(launched._adapters._matrices) == [base]
    assert launched.add_adapter(made(5)) == base + 1


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
    pytest.importorskip("llguidance")
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
    rows = batch_of(
        [Sequence([1, 0], 32), Sequence([2], 32)],
        [[1, 2, 3], [5]],
        [([], []), ([7, 8], [-1, -1])],
        True,
    )
    kv = KvConfig((4,), 32, "f32")
    got, want = (
        forward(compile_program(backend, program, tensors, kv, 1, activations), rows).logits
        for backend in ("cuda", "reference")
    )
    assert np.linalg.norm(got - want) < gap * np.linalg.norm(want)
