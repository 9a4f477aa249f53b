"""OpenVINO GenAI: its plain pipeline for one request, its pipeline with continuous batching for
several.
"""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import numpy as np
import openvino as ov
import openvino_genai as genai

from engines import Times


class Engine:
    """Prompts and outputs are token ids, without detokenisation."""

    version = version("openvino-genai")

    def __init__(self, model: Path, threads: int, num_requests: int, longest: int) -> None:
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._one = self._many = None
        if num_requests == 1:
            self._one = genai.LLMPipeline(str(model), "CPU", **properties)
        else:
            scheduler = genai.SchedulerConfig()
            scheduler.max_num_seqs = num_requests
            scheduler.enable_prefix_caching = False
            scheduler.cache_size = 2  # GB
            self._many = genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Times]:
        config = genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        inputs = [ov.Tensor(np.array([ids], np.int64)) for ids in prompts]
        if self._one:
            return [self._alone(ids, config) for ids in inputs]
        return self._together(inputs, config)

    def _alone(self, ids: ov.Tensor, config: genai.GenerationConfig) -> Times:
        metrics = self._one.generate(ids, config).perf_metrics
        if metrics.get_num_generated_tokens() != config.max_new_tokens:
            raise RuntimeError(
                f"{metrics.get_num_generated_tokens()} tokens instead of {config.max_new_tokens}"
            )
        return Times(metrics.get_ttft().mean / 1000, metrics.get_generate_duration().mean / 1000)

    def _together(self, inputs: list[ov.Tensor], config: genai.GenerationConfig) -> list[Times]:
        start = perf_counter()
        handles = [self._many.add_request(i, ids, config) for i, ids in enumerate(inputs)]
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        while self._many.has_non_finished_requests():
            self._many.step()
            now = perf_counter() - start
            for i, handle in enumerate(handles):
                if handle.can_read():
                    handle.read()
                    first.setdefault(i, now)
                    last[i] = now
        return [Times(first[i], last[i]) for i in range(len(inputs))]
