"""The default model on the GPU backend in float32: tokens equal other backends. In the
interpreter a step takes a minute.

A GPU machine without the model and without a network reports the test as skipped.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.backend import compile_program, forward
from headrace.backend.cuda.interpreter import is_interpreting
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import KvConfig
from headrace.errors import ModelNotFoundError
from headrace.model import trace_model
from tests.backend.batches import Sequence, batch_of

GREEDY = json.loads((Path(__file__).parents[2] / "data" / "greedy.json").read_text())["greedy"]


def default_model() -> Path:
    """Return the file of the default model, and download it if necessary."""
    try:
        return resolve("smollm2", progress=False)
    except ModelNotFoundError as error:
        if is_interpreting():
            raise
        pytest.skip(f"copy the cache of a machine that has the default model: {error}")


def test_greedy_tokens_are_those_of_float32() -> None:
    """The prompt and its continuation run in one step; the top token of each row is the
    next token.
    """
    checkpoint = open_checkpoint(default_model())
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    executable = compile_program(
        "cuda", program, checkpoint.tensors, KvConfig((4,), 64, "f32"), 1, "f32"
    )
    prompt = GREEDY[0]["prompt_ids"]
    followed = GREEDY[0]["hf_fp32"]["ids"][:12]
    ids = prompt + followed[:-1]
    logits = forward(
        executable, batch_of([Sequence([2, 0, 1], 64)], [ids], [([], [])], False)
    ).logits
    assert logits is not None
    assert np.argmax(logits[len(prompt) - 1 :], axis=1).tolist() == followed
