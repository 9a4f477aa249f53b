"""`attention_top_blocks=`: rows attend to chosen blocks of KV. Within the mode, promise 1 holds."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM
from headrace.backend import compile_program, forward
from headrace.backend_traits import KvDtype, check_top_blocks, traits_of
from headrace.checkpoint.key_biases import split_key_biases
from headrace.config import EngineConfig, KvConfig
from headrace.errors import RequestError, UnsupportedModelError
from headrace.loader.options import engine_config
from headrace.model import trace_model
from headrace.model.spec import MlaSpec, ModelSpec, RopeSpec
from headrace.outputs import RequestOutput
from headrace.parallel.tensor import TensorParallel
from headrace.program.op import StepSize
from headrace.program.ops import Attention
from headrace.quant.formats import StoredTensor
from headrace.quant.kv import bound_bytes
from headrace.sampling_params import SamplingParams
from tests.backend.batches import Sequence, batch_of
from tests.checkpoint.conftest import write_tiny_gguf
from tests.engine.test_promise import BIASED, GEMMA, LOADS, VOCAB, Ask, keeps_the_promise, truth
from tests.parallel.lockstep import LockStep
from tests.random_trees import RandomTrees
from tests.tiny import Tensors, run_all, tiny_engine, tiny_model

TOP: dict[str, Any] = {"attention_top_blocks": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"seed": 0},
    "one head": {"seed": 2, "kv_heads": 1, "format": "Q8_0"},
    "windows": {"seed": 3, "window": (230, 0), "layers": 3},
    "gemma3": {
        "seed": 6,
        "architecture": "gemma3",
        "window": (9, 0),
        "window_rope": RopeSpec(8, 100.0),
        **GEMMA,
    },
    "alibi": {
        "seed": 8,
        "architecture": "bloom",
        "rope": None,
        "alibi_bias": 8.0,
        "embedding_norm": True,
        **BIASED,
    },
    "key biases": {"seed": 9, "qkv_bias": True},
    "latent": {
        "seed": 11,
        "architecture": "deepseek_v2",
        "rope": RopeSpec(4),
        "mla": MlaSpec(24, 12, query_rank=16, is_absorbed=True),
    },
}
TEXT = np.random.default_rng(5).integers(1, 60, 400).tolist()
REQUESTS: list[Ask] = [
    (TEXT[:250], SamplingParams(temperature=0, max_tokens=12, logprobs=2)),
    (TEXT[:190] + [7] * 9, SamplingParams(seed=1, max_tokens=30, logprobs=0, ignore_eos=True)),
    (TEXT[:160], SamplingParams(n=2, seed=2, max_tokens=9, logprobs=1, top_p=0.9)),
    (TEXT[9:290], SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1)),
    ([3, 4] * 5, SamplingParams(temperature=0, max_tokens=6, logprobs=1)),
]


@cache
def model(name: str) -> tuple[ModelSpec, Tensors]:
    spec, tensors = tiny_model(context=384, **MODELS[name])
    if name != "key biases":
        return spec, tensors
    for layer in range(spec.num_layers):
        bias = np.linspace(-40, 40, spec.num_kv_heads * spec.head_dim, dtype=np.float32)
        tensors[f"layers.{layer}.k_bias"] = StoredTensor.from_floats("k_bias", bias)
    return spec, split_key_biases(spec, tensors)


@cache
def alone(name: str, kv_dtype: str) -> list[RequestOutput]:
    """Run each request by itself, in one piece, with all KV kept."""
    options: dict[str, Any] = {
        "eos_ids": (60,),
        "kv_dtype": kv_dtype,
        "prefix_cache": False,
        "release_outside_window": False,
        "slots": 400,
        "max_num_batched_tokens": 400,
    }
    engine = tiny_engine(model(name), "cpu", **options, **TOP)
    return [run_all(engine, [request])[0] for request in REQUESTS]


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(list(MODELS)),
    drafts=st.sampled_from(["off", "suffix", "trees", "wide trees"]),
    **LOADS
    | {
        "which": st.just(0),
        "order": st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=5),
        "max_num_batched_tokens": st.sampled_from([5, 17, 64, 400]),
        "slots": st.sampled_from([330, 700, 2000]),
    },
)
def test_the_same_request_gives_the_same_tokens(
    name: str,
    drafts: str,
    which: int,
    order: list[int],
    stagger: int,
    kv_dtype: str,
    **options: Any,
) -> None:
    expected = alone(name, kv_dtype)
    nodes = {"trees": 9, "wide trees": 70}.get(drafts)
    proposer = RandomTrees(which, VOCAB, truth(expected, order), nodes) if nodes else drafts
    engine = tiny_engine(
        model(name), "cpu", eos_ids=(60,), kv_dtype=kv_dtype, proposer=proposer, **options, **TOP
    )
    keeps_the_promise(engine, order, stagger, expected, exact=True, requests=REQUESTS)


@pytest.mark.parametrize("kv_dtype", traits_of("cpu").kv_dtypes)
@pytest.mark.parametrize("name", MODELS)
def test_the_reference_chooses_the_same_blocks(name: str, kv_dtype: KvDtype) -> None:
    """Both backends differ from attention to all blocks, and not from each other."""
    spec, tensors = model(name)
    dense = trace_model(spec, tensors)
    sequence = Sequence([*range(1, 11), 0, 11], 32)
    logits = []
    for backend, program in [
        ("reference", dense.with_top_blocks(2)),
        ("cpu", dense.with_top_blocks(2)),
        ("cpu", dense),
    ]:
        kv = KvConfig((12,) * len(program.kv_groups), 32, kv_dtype)
        executable = compile_program(backend, program, tensors, kv, 1, "f32")
        batch = batch_of([sequence], [TEXT[:300]], [([], [])], False, len(program.kv_groups))
        rows = forward(executable, batch).logits
        assert rows is not None
        logits.append(rows)
    want, got, all_blocks = logits
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    change = np.linalg.norm(all_blocks - want, axis=1) / np.linalg.norm(want, axis=1)
    if kv_dtype == "f32":  # no choice of any row differs, whether of bounds or of equal blocks
        assert error.max() < 1e-4
    # Keys that round differently choose differently, and int4 may take another range.
    limit = 0.1 if kv_dtype in ("int4", "k8v4") else 0.02
    assert np.mean(error[200:] > 0.05) <= limit
    assert (all_blocks[:160] == got[:160]).all()
    assert np.mean(change[200:] > 1e-3) > 0.5


@pytest.mark.parametrize("kv_dtype", ["f32", "int4"])
def test_rows_of_a_draft_tree_choose_blocks_of_their_own_path(kv_dtype: KvDtype) -> None:
    """Slots of a deep tree hold other tokens between the tokens of a path."""
    spec, tensors = model("llama")
    program, kv = trace_model(spec, tensors).with_top_blocks(1), KvConfig((12,), 32, kv_dtype)
    path, leaves = TEXT[200:250], TEXT[250:300]
    plain, with_tree = (compile_program("cpu", program, tensors, kv, 1) for _ in range(2))
    straight = batch_of([Sequence([*range(12)], 32)], [TEXT[:150] + path], [([], [])], False)
    expected = forward(plain, straight).logits

    sequence = Sequence([*range(12)], 32)
    forward(with_tree, batch_of([sequence], [TEXT[:149]], [([], [])], False))
    sequence.computed = 149
    # Each token of the path has a sibling, which is a leaf.
    tree = [token for pair in zip(path, leaves, strict=True) for token in pair]
    parents = [2 * (i // 2 - 1) if i > 1 else -1 for i in range(len(tree))]
    logits = forward(
        with_tree, batch_of([sequence], [TEXT[149:150]], [(tree, parents)], True)
    ).logits
    assert expected is not None and logits is not None
    np.testing.assert_array_equal(logits[1::2], expected[150:])


def test_top_blocks_that_are_all_blocks_change_nothing() -> None:
    results = []
    for top_blocks in (0, 9):
        engine = tiny_engine(model("llama"), "cpu", slots=400, attention_top_blocks=top_blocks)
        results.append(run_all(engine, REQUESTS[:1])[0].outputs[0])
    assert results[0] == results[1]


def test_top_blocks_cost_what_they_read() -> None:
    program = trace_model(*model("llama")).with_top_blocks(2)
    (attention, *_) = [op for op in program.ops if isinstance(op, Attention)]
    deep = StepSize(((10_000, 1),), 1, 2.0)
    candidates, numbers = 10_000 // 32 - 2, 2 * (8 + 8)
    assert attention.bytes(deep) == (4 * 32 + 1) * numbers * 2 + candidates * 2 * bound_bytes(8)
    short = StepSize(((100, 1),), 1, 2.0)
    assert attention.bytes(short) == 101 * numbers * 2


def test_memory_has_the_bounds_of_keys() -> None:
    dense = trace_model(*model("llama"))
    (group,), (bounded,) = dense.kv_groups, dense.with_top_blocks(2).kv_groups
    extra = 2 * 2 * bound_bytes(8)  # layers, heads
    assert bounded.block_bytes("bf16", 32) == group.block_bytes("bf16", 32) + extra
    kv = KvConfig((12,), 32, "bf16")
    executable: Any = compile_program("cpu", dense.with_top_blocks(2), model("llama")[1], kv, 1)
    assert executable.plan.kv_bytes == [12 * bounded.block_bytes("bf16", 32)]


def test_top_blocks_are_reported_as_lossy() -> None:
    text = "attends to the first, the last 2 and the best 125 blocks of 32 tokens"
    assert EngineConfig(attention_top_blocks=125).lossy == text


@pytest.mark.parametrize("value", [-1, 2**21 + 1, 1.5])
def test_a_wrong_number_of_top_blocks_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="attention_top_blocks"):
        engine_config({"attention_top_blocks": value})


@pytest.mark.parametrize("options", [{}, {"draft_layers": 1}, {"kv_dtype": "int8"}])
def test_top_blocks_draft_and_change_no_token(tmp_path: Path, options: dict[str, Any]) -> None:
    """The drafts choose blocks of the KV that the model itself reads whole."""
    model = str(write_tiny_gguf(tmp_path / "target.gguf"))
    prompts: list[Any] = [{"prompt_token_ids": [5 + token % 20 for token in TEXT[:180]]}]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    shared = {"threads": 1, "kv_dtype": options.get("kv_dtype", "bf16")}
    with (
        LLM(model, backend="cpu", **shared) as plain,
        LLM(
            model,
            backend="cpu",
            proposer="self_draft",
            draft_top_blocks=1,
            adaptive_speculation=False,
            **shared | options,
        ) as llm,
    ):
        assert (
            llm.generate(prompts, params)[0].outputs == plain.generate(prompts, params)[0].outputs
        )
        stats = llm.stats()
    assert stats.drafted > 0 and stats.proposer_failures == 0


@pytest.mark.parametrize("option", ["attention_top_blocks", "draft_top_blocks"])
def test_a_backend_without_top_blocks_refuses_them(option: str) -> None:
    with pytest.raises(RequestError, match=f"{option} 3 is not supported on cuda; choose backend"):
        check_top_blocks("cuda", option, 3)
    check_top_blocks("cuda", option, 0)


def test_tensor_parallel_ranks_choose_the_same_blocks() -> None:
    """Ranks with whole KV heads give the bits of one rank, and others are refused."""
    spec, tensors = model("llama")
    program = trace_model(spec, tensors).with_top_blocks(2)
    kv = KvConfig((12,), 32, "f32")
    batch = batch_of([Sequence([*range(12)], 32)], [TEXT[:300]], [([], [])], False)
    ranks = [TensorParallel(program, rank, 2).rewritten() for rank in range(2)]
    (expected,), results = (
        LockStep(stages, tensors, kv).logits(batch) for stages in ([[program]], [ranks])
    )
    for logits in results:
        np.testing.assert_array_equal(logits, expected)
    with pytest.raises(UnsupportedModelError, match="4 ranks divide the query heads of a KV head"):
        TensorParallel(program, 0, 4).rewritten()


@pytest.mark.parametrize("kv_dtype", traits_of("cpu").kv_dtypes)
def test_no_row_looks_past_a_key_that_is_not_finite(kv_dtype: KvDtype) -> None:
    """All rows that can see the token fail, though most blocks are not chosen."""
    spec, tensors = model("llama")
    embedding = tensors["embed"].dequantise().copy()
    embedding[60] = np.inf
    tensors = tensors | {"embed": StoredTensor.from_floats("embed", embedding)}
    text = [*TEXT[:70], 60, *TEXT[70:300]]
    program = trace_model(spec, tensors).with_top_blocks(1)
    executable = compile_program("cpu", program, tensors, KvConfig((12,), 32, kv_dtype), 1)
    logits = forward(
        executable, batch_of([Sequence([*range(12)], 32)], [text], [([], [])], False)
    ).logits
    assert logits is not None
    assert np.isfinite(logits[:70]).all() and not np.isfinite(logits[70:]).all(axis=1).any()
