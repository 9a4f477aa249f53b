"""Hugging Face transformers on torch: plain `generate`, with one batch of equally long prompts."""

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from engines import Times


class Engine:
    """Prompts and outputs are token ids, without detokenisation."""

    version = f"{transformers.__version__}, torch {torch.__version__}"

    def __init__(self, model: Path, threads: int, num_requests: int, longest: int) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Times]:
        ids = torch.tensor(prompts)
        watch = _Stopwatch()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([watch]),
            )
        if len(watch.times) != num_tokens:
            raise RuntimeError(f"{len(watch.times)} tokens instead of {num_tokens}")
        return [Times(watch.times[0], watch.times[-1])] * len(prompts)


class _Stopwatch(StoppingCriteria):
    """Records the time after each token of the batch; never stops."""

    def __init__(self) -> None:
        self.start = perf_counter()
        self.times: list[float] = []

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        self.times.append(perf_counter() - self.start)
        return torch.zeros(len(input_ids), dtype=torch.bool)
