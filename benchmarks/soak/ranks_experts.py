"""Random mixtures of requests to models with experts on ranks, equal to one rank to the bit: tokens
and log-probabilities. Ranks are killed while requests run and while adapters come and go. Default:
2,000 requests; SOAK_SEED chooses others.
"""

import os
import random
import signal
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import Findings

from headrace import LLM, SamplingParams
from headrace.outputs import RequestOutput
from headrace.parallel import workers
from tests.families import VARIANTS
from tests.parallel.test_processes import children, save_with_tokenizer
from tests.test_adapters import write_adapter

_REQUESTS = 2000
_FAMILIES = [
    name
    for name, variant in VARIANTS.items()
    if "num_experts_per_tok" in variant.options or variant.family == "mixtral"
]
_WITH_ADAPTER = ("mixtral",)
_MESHES = ((2, 1), (1, 2), (2, 2), (3, 1))
_ROUNDS = 6


def run(findings: Findings) -> None:
    seed = int(os.environ.get("SOAK_SEED", "1"))
    rng, counts = random.Random(seed), Counter[str]()
    deadline = time.monotonic() + (findings.seconds or 1e9)
    workers._MAX_RESTARTS = 10**6
    with tempfile.TemporaryDirectory() as folder:
        while counts["requests"] < _REQUESTS and time.monotonic() < deadline:
            _run_model(rng, Path(folder), counts, deadline)
            findings.says(f"{dict(counts)}")
    findings.holds(not counts["different"], f"{counts['requests']} requests, all equal")
    findings.holds(not children(), "no process is left")


def _run_model(rng: random.Random, folder: Path, counts: Counter[str], deadline: float) -> None:
    name = rng.choice(_FAMILIES)
    tensor, pipeline = rng.choice(_MESHES)
    if name == "gpt-oss" and tensor == 3:
        tensor = 2
    options: dict[str, Any] = {
        "threads": 1,
        "kv_blocks": rng.choice([16, 32]),
        "kv_dtype": rng.choice(["bf16", "f32", "int8", "int4"]),
        "max_num_seqs": rng.choice([2, 4, 8]),
        "max_num_batched_tokens": rng.choice([16, 40, 512]),
        "chunked_prefill_size": rng.choice([4, 16, 0]),
        "proposer": rng.choice(["off", "suffix", "auto", "lookahead"]),
        "adaptive_speculation": rng.random() < 0.5,
        "prefix_cache": rng.random() < 0.8,
    }
    mesh = {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "enable_expert_parallel": rng.random() < 0.75,
        "enable_sequence_parallel": tensor > 1 and rng.random() < 0.3,
    }
    model = folder / name
    if not model.exists():
        save_with_tokenizer(name, model)
        write_adapter(folder / f"{name}-adapter", 4, layers=(0, 1), heads=64, dim=64)
    adapter = folder / f"{name}-adapter" if name in _WITH_ADAPTER else None
    started = f"{name} {mesh} {options}"
    with LLM(model, **options) as one, LLM(model, **options, **mesh) as many:
        for _ in range(_ROUNDS):
            if time.monotonic() > deadline:
                return
            prompts, params = _requests(rng)
            names: list[str | None] = [None] * len(prompts)
            if adapter:
                one.load_adapter("a", adapter)
                names = [rng.choice([None, "a"]) for _ in prompts]
            expected = _results(one.generate(prompts, params, adapter=names))
            found = _disturbed(rng, many, prompts, params, names, adapter, counts)
            if adapter:
                one.unload_adapter("a")
            counts["requests"] += len(prompts)
            for before, after in zip(expected, found, strict=True):
                if before != after:
                    counts["different"] += 1
                    print(f"    differs: {started}\n      {before}\n      {after}", flush=True)


def _disturbed(
    rng: random.Random,
    many: LLM,
    prompts: list[Any],
    params: list[SamplingParams],
    names: list[str | None],
    adapter: Path | None,
    counts: Counter[str],
) -> list[Any]:
    """Generate on ranks, one of which may be killed at any moment, also of a load or unload."""
    kills = rng.random() < 0.4
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(_kill, rng.uniform(0, 0.6), rng.random()) if kills else None
        if adapter:
            for _ in range(rng.randrange(3)):
                many.load_adapter("a", adapter)
                many.unload_adapter("a")
            many.load_adapter("a", adapter)
        running = many.generate(prompts, params, adapter=names)
        if adapter:
            many.unload_adapter("a")
        counts["killed ranks"] += bool(killing and killing.result())
    return _results(running)


def _kill(seconds: float, which: float) -> bool:
    time.sleep(seconds)
    pids = children()
    if pids:
        os.kill(pids[int(which * len(pids))], signal.SIGKILL)
    return bool(pids)


def _requests(rng: random.Random) -> tuple[list[Any], list[SamplingParams]]:
    shared = [rng.randrange(3, 93) for _ in range(40)]
    prompts: list[Any] = []
    params: list[SamplingParams] = []
    for _ in range(rng.randrange(8, 25)):
        length = rng.choice([1, 5, 17, 33, 60, 120])
        tail = [rng.randrange(3, 93) for _ in range(length)]
        prompt = rng.choice([tail, shared[: rng.randrange(40)] + tail, tail[:3] * 12])
        prompts.append({"prompt_token_ids": prompt})
        params.append(
            SamplingParams(
                max_tokens=rng.choice([1, 4, 12, 30]),
                temperature=rng.choice([0.0, 0.8, 1.2]),
                seed=rng.randrange(1000),
                n=rng.choice([1, 1, 1, 3]),
                logprobs=rng.choice([None, 0, 2]),
                prompt_logprobs=rng.choice([None, None, 1]),
                ignore_eos=rng.random() < 0.7,
                repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            )
        )
    return prompts, params


def _results(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (
            [(one.token_ids, one.text, one.logprobs, one.finish_reason) for one in output.outputs],
            output.prompt_logprobs,
        )
        for output in outputs
    ]
