"""Greedy tokens of tiny models, with their log-probabilities, in each instruction set of this
processor: `python -m tests.arm.tokens`.
"""

import json
import os

from headrace import _native
from headrace.quant.formats import FORMATS
from headrace.sampling_params import SamplingParams
from tests.tiny import run_all, tiny_engine, tiny_model

PROMPTS = ([3, 17, 42, 5, 8, 11, 60, 2], [9], [30, 31, 32, 33])
DTYPES = ("bf16", "int8", "int4")
"""Of KV: the weights of these are Q8_0."""

Outputs = list[tuple[list[int], list[float]]]
"""Of each prompt the tokens, and the log-probability of each."""


def generated() -> dict[str, Outputs]:
    """What the models answer in the instruction set that HEADRACE_ISA names."""
    models = {name: (name, "f32") for name in FORMATS} | {
        f"KV in {dtype}": ("Q8_0", dtype) for dtype in DTYPES
    }
    return {title: outputs(*model) for title, model in models.items()}


def outputs(format_name: str, kv_dtype: str) -> Outputs:
    model = tiny_model(7, dim=256, ffn=512, format=format_name)
    engine = tiny_engine(model, "cpu", kv_dtype=kv_dtype, threads=2)
    results = run_all(
        engine,
        [(prompt, SamplingParams(temperature=0, max_tokens=24, logprobs=0)) for prompt in PROMPTS],
    )
    answers = []
    for out in (result.outputs[0] for result in results):
        assert out.logprobs
        answers.append(
            (
                out.token_ids,
                [
                    entry[token].logprob
                    for entry, token in zip(out.logprobs, out.token_ids, strict=True)
                ],
            )
        )
    return answers


if __name__ == "__main__":
    found = {}
    for isa in _native.isas():
        os.environ["HEADRACE_ISA"] = isa
        found[isa] = generated()
    print(json.dumps(found))
