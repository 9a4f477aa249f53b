"""Ranks in processes of their own: the same tokens and log-probabilities, whatever else is on, and
after a rank is lost.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.errors import RankLostError
from headrace.outputs import RequestOutput
from headrace.parallel.transport import GlooCarrier
from tests.families import save_model
from tests.test_adapters import write_adapter

ADAPTERS = [None, "other", None, None, "other"]
STACK = {
    "adaptive_speculation": False,
    "kv_dtype": "int8",
    "kv_blocks": 6,
    "proposer": "ngram",
    "max_num_seqs": 4,
    "threads": 1,
    "chunked_prefill_size": 8,
}


def requests() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Prompts of which some begin alike and some repeat themselves, greedy and sampled, more of
    them than blocks.
    """
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 100, 33).tolist()
    prompts = [[*shared, *rng.integers(3, 100, 3).tolist()] for _ in range(3)] + [
        [7, 8, 9, 10] * 5,
        rng.integers(3, 100, 20).tolist(),
    ]
    params = [
        SamplingParams(
            max_tokens=90, temperature=0.9 if i % 2 else 0.0, seed=i, logprobs=2, ignore_eos=True
        )
        for i in range(5)
    ]
    return [{"prompt_token_ids": prompt} for prompt in prompts], params


def said(outputs: list[RequestOutput]) -> list[Any]:
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each with an adapter beside it."""
    folder = tmp_path_factory.mktemp("models")
    for name, heads in (("qwen3", 128), ("mixtral", 64)):
        write_adapter(folder / f"{name}-adapter", 4, layers=(0, 1), heads=heads, dim=64)
    return {name: saved(name, folder / name) for name in ("qwen3", "mixtral")}


def load_adapter(llm: LLM, model: Path) -> None:
    llm.load_adapter("other", model.with_name(f"{model.name}-adapter"))


def saved(name: str, folder: Path) -> Path:
    save_model(name, folder)
    model = {"type": "BPE", "vocab": {chr(ord("!") + i): i for i in range(93)}, "merges": []}
    decoder = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model})
    )
    return folder


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[Any]]:
    found = {}
    for name, model in models.items():
        with LLM(model, **STACK) as llm:
            load_adapter(llm, model)
            found[name] = said(llm.generate(*requests(), adapter=ADAPTERS))
            assert found[name][1] != said(llm.generate(*requests()))[1]
    return found


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [("qwen3", 3, 1), ("qwen3", 1, 2), ("mixtral", 2, 1), ("mixtral", 2, 2)],
)
def test_all_at_once(
    models: dict[str, Path], expected: dict[str, list[Any]], name: str, tensor: int, pipeline: int
) -> None:
    """Quantised KV in few blocks, drafts, chunks, a prefix cache, adapters and preemption, with
    requests that join and leave.
    """
    with LLM(
        models[name], tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **STACK
    ) as llm:
        prompts, params = requests()
        load_adapter(llm, models[name])
        assert said(llm.generate(prompts, params, adapter=ADAPTERS)) == expected[name]
        for _ in range(2):
            assert said(llm.generate(prompts[0], params[0])) == expected[name][:1]
        stats = llm.stats()
    assert stats.preemptions and stats.cached_tokens and stats.drafted


def test_the_stack_over_the_default_model(tmp_path: Path) -> None:
    """Quantised weights, stages of two ranks, paged KV in int8, drafts, adapters and in-flight
    batching at once.
    """
    prompts = [
        "The water wheel turns, the water wheel turns, the water",
        "How does a water wheel work?",
        "1, 2, 3, 4, 5, 6,",
    ]
    params = [
        SamplingParams(max_tokens=24, temperature=0.7 * (i % 2), seed=i, logprobs=1)
        for i in range(3)
    ]
    options = {
        "adaptive_speculation": False,
        "max_model_len": 256,
        "threads": 1,
        "kv_dtype": "int8",
        "proposer": "ngram",
        "max_num_seqs": 2,
    }
    adapter, found = write_adapter(tmp_path / "adapter", 4), []
    for tensor, pipeline, sequence in (
        (1, 1, False),
        (2, 1, True),
        (3, 1, False),
        (1, 2, False),
        (2, 2, False),
    ):
        sizes = {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": pipeline,
            "enable_sequence_parallel": sequence,
        }
        with LLM(**options, **sizes) as llm:
            llm.load_adapter("other", adapter)
            found.append(said(llm.generate(prompts, params, adapter=[None, None, "other"])))
            assert llm.stats().drafted
        assert found[-1] == found[0], sizes


@pytest.mark.parametrize(
    ("number", "tensor", "pipeline"), [(signal.SIGKILL, 2, 1), (signal.SIGSTOP, 1, 2)]
)
def test_a_rank_that_is_lost(
    models: dict[str, Path], expected: dict[str, list[Any]], number: int, tensor: int, pipeline: int
) -> None:
    """It is found, all ranks are started again, and the requests go on with the same tokens;
    nothing is left over.
    """
    with LLM(
        models["qwen3"], tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **STACK
    ) as llm:
        load_adapter(llm, models["qwen3"])
        (follower,) = children()
        with ThreadPoolExecutor(1) as pool:
            running, before = (
                pool.submit(partial(llm.generate, *requests(), adapter=ADAPTERS)),
                llm.stats().steps,
            )
            while llm.stats().steps < before + 5:
                assert not running.done()
            os.kill(follower, number)
            assert said(running.result()) == expected["qwen3"]
        assert llm.stats().failed_steps == 1
        (again,) = children()
        assert again != follower
        os.kill(again, signal.SIGKILL)  # while nothing runs
        assert said(llm.generate(*requests(), adapter=ADAPTERS)) == expected["qwen3"]
    assert not children()


def test_two_models_in_one_process(models: dict[str, Path]) -> None:
    """Each has ranks of its own, and goes on when the other ends."""
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    with LLM(models["qwen3"], tensor_parallel_size=2, threads=1) as llm:
        expected = said(llm.generate({"prompt_token_ids": [5, 6]}, params))
        with LLM(models["mixtral"], pipeline_parallel_size=2, threads=1) as other:
            other.generate({"prompt_token_ids": [5, 6]}, params)
            assert said(llm.generate({"prompt_token_ids": [5, 6]}, params)) == expected
        assert said(llm.generate({"prompt_token_ids": [5, 6]}, params)) == expected


def test_a_rank_that_is_lost_while_it_is_linked(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not waited for: making the model fails at once."""
    groups = GlooCarrier.groups

    def without_the_other(carrier: GlooCarrier, store: Any) -> tuple[Any, Any]:
        os.kill(children()[0], signal.SIGKILL)
        time.sleep(0.1)
        return groups(carrier, store)

    monkeypatch.setattr(GlooCarrier, "groups", without_the_other)
    begun = time.monotonic()
    with pytest.raises(RankLostError):
        LLM(models["qwen3"], tensor_parallel_size=2, threads=1)
    assert time.monotonic() - begun < 60 and not children()


def test_no_rank_outlives_the_first(models: dict[str, Path]) -> None:
    """Not one that is stopped either; nor is anything left in shared memory."""
    shared = set(Path("/dev/shm").iterdir())
    code = (
        f"from headrace import LLM; llm = LLM({str(models['qwen3'])!r}, "
        "tensor_parallel_size=3, threads=1); print(1, flush=True); input()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdout and first.stdout.readline() == b"1\n"
    ranks = children(first.pid)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGSTOP)
    first.kill()
    first.wait()
    deadline = time.monotonic() + 5
    while left := [rank for rank in ranks if is_running(rank)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    assert set(Path("/dev/shm").iterdir()) <= shared


def test_ranks_that_could_differ_are_refused(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "headrace.parallel.rank._native.isa", lambda: "abacus"
    )  # of this process alone
    with pytest.raises(
        RankLostError,
        match=r"rank 1 is not like rank 0.*instructions \w+, tensors (\w+), and instructions "
        r"abacus, tensors \1$",
    ):
        LLM(models["qwen3"], tensor_parallel_size=2, threads=1)
    assert not children()


def is_running(pid: int) -> bool:
    """Whether a process is there, and more than a name that its parent has not asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(parent: int = os.getpid()) -> list[int]:
    """The ranks that a process has started, and that are there."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found += (
                    [int(stat.parent.name)]
                    if "rank_process" in (stat.parent / "cmdline").read_text()
                    else []
                )
    return found
