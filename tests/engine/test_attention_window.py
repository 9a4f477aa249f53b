"""`attention_window=`: a window with sinks over layers that were trained without one. KV memory is
bounded.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backend import compile_program, forward
from headrace.checkpoint.load import open_checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.model import trace_model
from headrace.outputs import RequestOutput
from headrace.request import PoolingParams
from headrace.sampling_params import SamplingParams
from tests.backend.batches import Sequence, batch_of
from tests.draft_engines import draft_engine
from tests.engine.test_promise import LOADS, REQUESTS, VOCAB, keeps_the_promise, model, same, truth
from tests.families import save_model
from tests.random_trees import RandomTrees
from tests.tiny import drain, run_all, tiny_engine

LIMITED: dict[str, Any] = {"attention_window": 7, "attention_sinks": 3}
WHICH = [0, 3, 5, 7, 8, 9]
"""Models of `test_promise.MODELS` with layers that see everything: two of them beside layers with a
window.
"""


@cache
def alone(which: int, kv_dtype: str) -> list[RequestOutput]:
    """Run each request by itself, in one piece, with all KV kept."""
    options: dict[str, Any] = {
        "eos_ids": (60,),
        "kv_dtype": kv_dtype,
        "prefix_cache": False,
        "release_outside_window": False,
    }
    engine = tiny_engine(model(which), "cpu", **options, **LIMITED)
    return [run_all(engine, [request])[0] for request in REQUESTS]


@settings(max_examples=25, deadline=None)
@given(drafts=st.booleans(), **LOADS | {"which": st.sampled_from(WHICH)})
def test_the_same_request_gives_the_same_tokens(
    drafts: bool, which: int, order: list[int], stagger: int, kv_dtype: str, **options: Any
) -> None:
    expected = alone(which, kv_dtype)
    if drafts:
        options["proposer"] = RandomTrees(0, VOCAB, truth(expected, order), 9)
    engine = tiny_engine(
        model(which), "cpu", eos_ids=(60,), kv_dtype=kv_dtype, **options, **LIMITED
    )
    keeps_the_promise(engine, order, stagger, expected, exact=True)


@pytest.mark.parametrize("how", ["draft_model", "self_draft", "medusa"])
def test_models_that_draft_have_the_same_window(how: str) -> None:
    engine, _ = draft_engine(model(0), how, depth=3, slots=800, max_num_batched_tokens=9, **LIMITED)
    (result,) = run_all(engine, [REQUESTS[2]])
    same(result, alone(0, "f32")[2], exact=True)
    assert engine.stats().drafted > 0


@pytest.mark.parametrize(("window", "sinks"), [(7, 3), (40, 4), (1, 0), (9, 33), (5, 200)])
@pytest.mark.parametrize("name", ["llama3-gqa", "gemma2"])
def test_logits_match_transformers_with_an_attention_window(
    name: str, window: int, sinks: int, tmp_path: Path
) -> None:
    """Layers with a window of their own keep it; only the other layers get the new window."""
    torch_model, tokens = (
        save_model(name, tmp_path),
        np.random.default_rng(0).integers(0, 101, 120).tolist(),
    )
    own = open_checkpoint(tmp_path)
    program = trace_model(own.spec, own.tensors).with_window(window, sinks)
    rows, columns = np.indices((120, 120))
    seen = (columns <= rows) & ((columns > rows - window) | (columns < sinks))
    mask: Any = torch.where(torch.tensor(seen), 0.0, torch.finfo(torch.float32).min)[None, None]
    if own.spec.windows:
        near = torch.tensor((columns <= rows) & (columns > rows - max(own.spec.windows)))
        mask = {
            "full_attention": mask,
            "sliding_attention": torch.where(near, 0.0, torch.finfo(torch.float32).min)[None, None],
        }
    with torch.no_grad():
        want = torch_model(torch.tensor([tokens]), attention_mask=mask).logits[0].numpy()
    for backend in ("reference", "cpu"):
        kv = KvConfig((10,) * len(program.kv_groups), 32, "f32")
        executable = compile_program(backend, program, own.tensors, kv, 1)
        batch = batch_of(
            [Sequence([*range(0, 10, 2), *range(9, 0, -2)], 32)],
            [tokens],
            [([], [])],
            False,
            len(program.kv_groups),
        )
        got = forward(executable, batch).logits
        assert np.linalg.norm(got - want) < 1e-4 * np.linalg.norm(want)


def test_kv_memory_is_bounded_by_the_window() -> None:
    """The number of blocks grows to the limit of the group and stays there."""
    engine = tiny_engine(
        model(0), "cpu", slots=32 * 40, max_num_batched_tokens=40, max_model_len=128, **LIMITED
    )
    (group,), used = engine.limits.kv_groups, []
    assert (group.window, group.num_sink_tokens) == (7, 3)
    engine.add_request([1] * 90, SamplingParams(temperature=0, max_tokens=38, ignore_eos=True))
    while engine.has_work:
        engine.step()
        used.append(sum(group.blocks_used for group in engine.stats().kv))
    most = group.num_blocks(128, 40, 32)
    assert (
        most == 1 + 3 and max(used) <= most and 2 in used[-20:]
    )  # the sinks and the blocks of the window


def test_a_prefix_hit_after_blocks_were_released() -> None:
    engine = tiny_engine(model(0), "cpu", slots=32 * 40, max_num_batched_tokens=40, **LIMITED)
    prompt, params = (
        list(range(1, 60)) + [3] * 40,
        SamplingParams(temperature=0, max_tokens=3, logprobs=1),
    )
    first, second = (run_all(engine, [(prompt, params)])[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 96)
    same(first, second, exact=True)


def test_an_embedding_with_an_attention_window() -> None:
    vectors = []
    for rows in (512, 5):
        engine = tiny_engine(model(0), "cpu", slots=800, max_num_batched_tokens=rows, **LIMITED)
        engine.add(engine.check(list(range(1, 38)), pooling=PoolingParams(pooling="mean")))
        vectors += [update.result.embedding for update in drain(engine) if update.result]
    assert vectors[0].tobytes() == vectors[1].tobytes()


def test_an_attention_window_is_reported_as_lossy() -> None:
    assert EngineConfig().lossy == EngineConfig(attention_sinks=9).lossy == ""
    assert (
        EngineConfig(attention_window=512).lossy
        == "attends to the first 4 and the last 512 tokens only"
    )
    assert (
        EngineConfig(attention_window=1024, attention_sinks=0).lossy
        == "attends to the last 1,024 tokens only"
    )


def test_windows_of_the_model_stay() -> None:
    spec, tensors = model(3)
    assert [group.window for group in trace_model(spec, tensors).kv_groups] == [6, 0]
    groups = trace_model(spec, tensors).with_window(20, 2).kv_groups
    assert [(group.window, group.num_sink_tokens) for group in groups] == [(6, 0), (20, 2)]
    assert trace_model(spec, tensors).with_window(0, 4) == trace_model(spec, tensors)
