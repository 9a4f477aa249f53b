"""The trace: 500 requests with log-normal lengths, many short and a few long."""

import numpy as np
from bench import Ask

NUM_REQUESTS = 500
MAX_PROMPT, MAX_OUTPUT = 1024, 512
WORDS = (
    "prompts of 128 tokens in the median (sigma 0.8, at most 1,024), outputs of 64 (sigma "
    "1.0, at most 512)"
)


def trace(vocab_size: int, num_requests: int = NUM_REQUESTS) -> list[Ask]:
    """The first requests of the trace, the same in every run."""
    rng = np.random.default_rng(20)
    prompts = np.clip(rng.lognormal(np.log(128), 0.8, NUM_REQUESTS), 1, MAX_PROMPT).astype(int)
    outputs = np.clip(rng.lognormal(np.log(64), 1.0, NUM_REQUESTS), 1, MAX_OUTPUT).astype(int)
    tokens = [rng.integers(vocab_size, size=length).tolist() for length in prompts]
    return [Ask(prompt, int(length)) for prompt, length in zip(tokens, outputs, strict=True)][
        :num_requests
    ]
