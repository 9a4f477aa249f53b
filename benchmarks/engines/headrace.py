"""Headrace, through `LLM`."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from engines import Times
from headrace import LLM, SamplingParams


class Engine:
    """One `LLM`; its times include sampling and detokenisation."""

    version = version("headrace")

    def __init__(self, model: Path, threads: int, num_requests: int, longest: int) -> None:
        self._llm = LLM(
            str(model), threads=threads, max_model_len=longest, max_num_seqs=num_requests
        )

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Times]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        timings = [
            result.timing
            for result in self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        ]
        return [Times(t.queue + t.prefill, t.queue + t.prefill + t.decode) for t in timings]
