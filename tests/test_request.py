"""Sampling parameters: accepted values, and messages for invalid ones."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.sampling_params import ReasoningMarkers, SamplingParams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, "temperature must be a number from 0 to 100, not nan"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": -2}, "top_k must be a whole number from -1 to"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number from 1e-06 to 100"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty"),
        ({"n": 0}, "n must be a whole number from 1 to 512, not 0"),
        ({"n": 10**9}, "n must be"),
        ({"n": None}, "n must be"),
        ({"beam_width": 0}, "beam_width must be a whole number from 1 to 512, not 0"),
        (
            {"beam_width": 2, "n": 3},
            "n 3 is greater than beam_width 2; a beam search returns at most 2 beams",
        ),
        (
            {"beam_width": 2, "temperature": 0.7},
            "temperature must be 0 or 1 in a beam search, which samples nothing, not 0.7",
        ),
        (
            {"beam_width": 2, "top_p": 0.9},
            "top_p must be 1 in a beam search, which samples nothing, not 0.9",
        ),
        ({"beam_width": 2, "top_k": 5}, "top_k must be 0 or -1 in a beam search"),
        ({"beam_width": 2, "min_p": 0.1}, "min_p must be 0 in a beam search"),
        ({"length_penalty": float("nan")}, "length_penalty must be a number from -10 to 10"),
        ({"early_stopping": "never"}, "early_stopping must be true or false"),
        ({"stop_after": "</think>"}, "stop_after must be ReasoningMarkers, not str"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens 17 is greater than max_tokens 16"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop": ""}, "stop has a string of 0 characters"),
        ({"stop": ["a", "x" * 1025]}, "stop has a string of 1,025 characters"),
        ({"stop": ["a"] * 65}, "stop has 65 strings"),
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"stop": 3}, "stop must be"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list"),
        ({"stop_token_ids": range(65)}, "stop_token_ids has more than 64 entries"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias has more than 1,024 entries"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"temprature": 1.0}, "unknown sampling parameter 'temprature'; did you mean temperature?"),
        ({"zzz": 1.0}, "unknown sampling parameter 'zzz'; choose from: n, temperature"),
    ],
)
def test_invalid_sampling_params_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**options)
    assert message in str(error.value)
    assert len(str(error.value)) < 500


def test_valid_sampling_params_are_converted() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=-1,
        max_tokens=None,
        min_tokens=100,
        stop="x" * 1024,
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int64(3): 1},
        seed=2**64 - 1,
    )
    assert params.temperature == 0.5
    assert params.stop == ["x" * 1024]
    assert params.stop_token_ids == [3, 4] and all(
        type(token) is int for token in params.stop_token_ids
    )
    assert params.logit_bias == {3: 1.0}
    assert SamplingParams(stop=["a", "b", "a"]).stop == ["a", "b"]
    assert SamplingParams() == SamplingParams(temperature=1.0, max_tokens=16, n=1)


def test_replaced_sampling_params_are_checked() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert replace(params, n=2).stop == ["a"]
    with pytest.raises(RequestError):
        replace(params, n=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"begin": ""}, "stop_after.begin must be text of 1 to 1,024 characters, not ''"),
        ({"end": 5}, "stop_after.end must be text"),
        ({"opener": "x" * 1025}, "stop_after.opener must be text of 0 to 1,024"),
        ({"has_begun": 1}, "stop_after.has_begun must be true or false, not 1"),
    ],
)
def test_wrong_markers_of_reasoning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ReasoningMarkers(**options)
