"""Ranks as processes: the tokens and log-probabilities of one rank, with all features together and
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
from safetensors.numpy import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.backend.cpu import instructions
from headrace.checkpoint.fingerprint import fingerprint
from headrace.checkpoint.load import open_checkpoint
from headrace.errors import RankLostError
from headrace.loader.calibration_file import write_calibration
from headrace.model import trace_model
from headrace.outputs import RequestOutput
from headrace.parallel.rank import identity
from headrace.parallel.transport import GlooTransport
from headrace.program.sparsity import sparse_inputs
from tests.drafters import random_drafter, random_eagle1, write_drafter, write_eagle1
from tests.families import VOCAB, save_model
from tests.test_adapters import write_adapter

ADAPTERS = [None, "other", None, None, "other"]
STACK = {
    "adaptive_speculation": False,
    "kv_dtype": "int8",
    "kv_blocks": 6,
    "proposer": "suffix",
    "max_num_seqs": 4,
    "threads": 1,
    "chunked_prefill_size": 8,
    "max_num_batched_tokens": 16,  # so that some steps have rows of prompts alone
}


def requests() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Prompts with shared prefixes and repetitions, greedy and sampled, for too few blocks."""
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


def tokens_and_logprobs(outputs: list[RequestOutput]) -> list[Any]:
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in outputs]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models, each with an adapter next to it."""
    folder = tmp_path_factory.mktemp("models")
    for name, heads in (("qwen3", 128), ("mixtral", 64)):
        write_adapter(folder / f"{name}-adapter", 4, layers=(0, 1), heads=heads, dim=64)
        add_own_weights(folder / f"{name}-adapter" / "adapter_model.safetensors")
    return {name: save_with_tokenizer(name, folder / name) for name in ("qwen3", "mixtral")}


def add_own_weights(adapter: Path) -> None:
    """Add modules that are saved whole: an embedding and a norm."""
    rng, prefix = np.random.default_rng(3), "base_model.model.model"
    own: dict[str, Any] = {
        f"{prefix}.embed_tokens.weight": rng.standard_normal((VOCAB, 64), np.float32) / 4,
        f"{prefix}.layers.1.input_layernorm.weight": rng.standard_normal(64, np.float32),
    }
    save_file(load_file(adapter) | own, adapter)


def load_adapter(llm: LLM, model: Path) -> None:
    llm.load_adapter("other", model.with_name(f"{model.name}-adapter"))


def save_with_tokenizer(name: str, folder: Path) -> Path:
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
    results = {}
    for name, model in models.items():
        with LLM(model, **STACK) as llm:
            load_adapter(llm, model)
            results[name] = tokens_and_logprobs(llm.generate(*requests(), adapter=ADAPTERS))
            assert results[name][1] != tokens_and_logprobs(llm.generate(*requests()))[1]
    return results


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [("qwen3", 3, 1), ("qwen3", 1, 2), ("mixtral", 2, 1), ("mixtral", 2, 2)],
)
def test_ranks_with_all_features(
    models: dict[str, Path], expected: dict[str, list[Any]], name: str, tensor: int, pipeline: int
) -> None:
    """Quantised KV in few blocks, drafts, chunks, prefix cache, adapters and preemption."""
    with LLM(
        models[name], tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **STACK
    ) as llm:
        prompts, params = requests()
        load_adapter(llm, models[name])
        assert (
            tokens_and_logprobs(llm.generate(prompts, params, adapter=ADAPTERS)) == expected[name]
        )
        for _ in range(2):
            assert tokens_and_logprobs(llm.generate(prompts[0], params[0])) == expected[name][:1]
        stats = llm.stats()
    assert stats.preemptions and stats.cached_tokens and stats.drafted


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["EAGLE-3", "EAGLE-1"])
def test_drafters_on_ranks(
    models: dict[str, Path],
    expected: dict[str, list[Any]],
    tmp_path: Path,
    kind: str,
    tensor: int,
    pipeline: int,
) -> None:
    """Rank 0 drafts from rows that it gets from all stages and shares; no token changes."""
    checkpoint = open_checkpoint(models["qwen3"])
    target = checkpoint.spec, dict(checkpoint.tensors)
    if kind == "EAGLE-3":
        write_drafter(tmp_path, random_drafter(target, vocab=50, taps=(0, 1, 2)), "authors")
    else:
        write_eagle1(tmp_path, random_eagle1(target), "authors")
    drafts = {"proposer": "draft_model", "draft_model": str(tmp_path)}
    with LLM(
        models["qwen3"],
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        **STACK | drafts,
    ) as llm:
        load_adapter(llm, models["qwen3"])
        got = tokens_and_logprobs(llm.generate(*requests(), adapter=ADAPTERS))
        assert got == expected["qwen3"]
        stats = llm.stats()
    assert stats.drafted and not stats.proposer_failures


def test_ranks_in_lossy_modes(models: dict[str, Path], tmp_path: Path) -> None:
    """Each rank reads the calibration files, and attaches the drafts of the first layers."""
    checkpoint = open_checkpoint(models["qwen3"])
    mark = fingerprint(checkpoint, checkpoint.load_tokenizer())
    inputs = sparse_inputs(trace_model(checkpoint.spec, checkpoint.tensors))
    facts: dict[str, dict[str, Any]] = {
        "activation_sparsity": {"sparsity": 0.5, "thresholds": dict.fromkeys(inputs, 0.1)},
        "early_exit": {"layers": 1, "min_margin": 0.05},
    }
    modes: dict[str, Any] = {"attention_top_blocks": 1, "attention_window": 100}
    for kind, content in facts.items():
        modes[kind] = str(tmp_path / f"{kind}.json")
        write_calibration(Path(modes[kind]), kind, mark, content)
    results = []
    for ranks in (1, 2):
        options = STACK | modes | {"proposer": "self_draft", "tensor_parallel_size": ranks}
        with LLM(models["qwen3"], **options) as llm:
            load_adapter(llm, models["qwen3"])
            generated = llm.generate(*requests(), adapter=ADAPTERS)
            results.append(tokens_and_logprobs(generated))
            assert llm.stats().drafted and llm.stats().preemptions
    assert results[0] == results[1]


def test_ranks_of_the_default_model_with_all_features(tmp_path: Path) -> None:
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
        "proposer": "suffix",
        "max_num_seqs": 2,
    }
    adapter, results = write_adapter(tmp_path / "adapter", 4), []
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
            results.append(
                tokens_and_logprobs(llm.generate(prompts, params, adapter=[None, None, "other"]))
            )
            assert llm.stats().drafted
        assert results[-1] == results[0], sizes


@pytest.mark.parametrize(
    ("number", "tensor", "pipeline"), [(signal.SIGKILL, 2, 1), (signal.SIGSTOP, 1, 2)]
)
def test_lost_rank_restarts(
    models: dict[str, Path], expected: dict[str, list[Any]], number: int, tensor: int, pipeline: int
) -> None:
    """All ranks restart, the requests continue with the same tokens, and no process is left."""
    with LLM(
        models["qwen3"], tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, **STACK
    ) as llm:
        load_adapter(llm, models["qwen3"])
        (worker,) = children()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(partial(llm.generate, *requests(), adapter=ADAPTERS))
            before = llm.stats().steps
            while llm.stats().steps < before + 5:
                assert not running.done()
            os.kill(worker, number)
            assert tokens_and_logprobs(running.result()) == expected["qwen3"]
        assert llm.stats().failed_steps == 1
        (again,) = children()
        assert again != worker
        os.kill(again, signal.SIGKILL)  # while nothing runs
        assert tokens_and_logprobs(llm.generate(*requests(), adapter=ADAPTERS)) == expected["qwen3"]
    assert not children()


def test_two_models_with_ranks_in_one_process(models: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    with LLM(models["qwen3"], tensor_parallel_size=2, threads=1) as llm:
        expected = tokens_and_logprobs(llm.generate({"prompt_token_ids": [5, 6]}, params))
        with LLM(models["mixtral"], pipeline_parallel_size=2, threads=1) as other:
            other.generate({"prompt_token_ids": [5, 6]}, params)
            assert (
                tokens_and_logprobs(llm.generate({"prompt_token_ids": [5, 6]}, params)) == expected
            )
        assert tokens_and_logprobs(llm.generate({"prompt_token_ids": [5, 6]}, params)) == expected


def test_rank_lost_while_connecting_fails_at_once(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_groups = GlooTransport.open_groups

    def without_the_other(transport: GlooTransport, store: Any) -> tuple[Any, Any]:
        os.kill(children()[0], signal.SIGKILL)
        time.sleep(0.1)
        return open_groups(transport, store)

    monkeypatch.setattr(GlooTransport, "open_groups", without_the_other)
    start = time.monotonic()
    with pytest.raises(RankLostError):
        LLM(models["qwen3"], tensor_parallel_size=2, threads=1)
    assert time.monotonic() - start < 60 and not children()


def test_no_rank_outlives_rank_0(models: dict[str, Path]) -> None:
    """A stopped rank ends too, and nothing is left in shared memory."""
    shared = shared_memory()
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
    deadline = time.monotonic() + 60
    while left := [rank for rank in ranks if is_running(rank)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    # Files that a process holds belong to another test.
    assert not {path for path in shared_memory() - shared if not is_held(path) and path.exists()}


def test_rank_with_other_instructions_is_refused(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # This changes rank 0 alone.
    monkeypatch.setattr(
        "headrace.parallel.rank.identity",
        lambda backend, tensors: identity(backend, tensors).replace(instructions(), "abacus"),
    )
    with pytest.raises(
        RankLostError,
        match=r"rank 1 differs from rank 0.*instructions \w+, tensors (\w+), and instructions "
        r"abacus, tensors \1$",
    ):
        LLM(models["qwen3"], tensor_parallel_size=2, threads=1)
    assert not children()


def shared_memory() -> set[Path]:
    """Shared memory of all processes but for folders, which tests beside this one make."""
    return {path for path in Path("/dev/shm").iterdir() if not path.is_dir()}


def is_held(path: Path) -> bool:
    """Whether a process has mapped the file or keeps it open."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if str(path) in (process / "maps").read_text():
                return True
            for link in (process / "fd").iterdir():
                with suppress(OSError):  # the file is closed
                    if os.readlink(link) == str(path):
                        return True
    return False


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(parent: int = os.getpid()) -> list[int]:
    """Ids of the running ranks that a process has started."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            is_child = int(stat.read_text().rpartition(")")[2].split()[1]) == parent
            if is_child and "rank_process" in (stat.parent / "cmdline").read_text():
                pids.append(int(stat.parent.name))
    return pids
