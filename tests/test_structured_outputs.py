"""Structured outputs: invalid values are refused with a message that names the field."""

from typing import Any

import numpy as np
import pytest

from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs import StructuredOutputs


def deep(levels: int) -> dict[str, Any]:
    return {"items": deep(levels - 1)} if levels > 1 else {"enum": []}


CYCLE: dict[str, Any] = {}
CYCLE["a"] = CYCLE


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({}, "choice, grammar, structural_tag or allowed_sequences; it has no field"),
        ({"json": {}, "regex": "a"}, "it has json and regex"),
        ({"json_object": True, "choice": ["a"]}, "it has choice and json_object"),
        ({"json_object": "yes"}, "json_object must be true or false"),
        ({"json": 3}, "json must be text"),
        ({"json": "{"}, "json is not a JSON schema"),
        ({"json": "[]"}, "json must be a schema, a JSON object"),
        ({"json": "true"}, "json must be a schema"),
        ({"json": '{"const": NaN}'}, "json is not a JSON schema"),
        ({"json": {"const": float("inf")}}, "json is not a JSON schema"),
        ({"json": {"const": {1, 2}}}, "json is not a JSON schema"),
        ({"json": {"const": "\ud800"}}, "json is not valid Unicode"),
        ({"json": CYCLE}, "json is not a JSON schema"),
        ({"json": deep(32)}, "json has more than 32 nested objects and lists"),
        ({"json": '{"a":' * 5000 + "1" + "}" * 5000}, "json "),
        ({"json": {"enum": ["x" * 10**6]}}, "json has 1,000,0"),
        ({"json": ""}, "json has 0 characters"),
        ({"regex": ""}, "regex has 0 characters"),
        ({"regex": "x" * 65537}, "regex has 65,537 characters; it must have 1 to 65,536"),
        ({"regex": b"a"}, "regex must be text"),
        ({"regex": "\udfff"}, "regex is not valid Unicode"),
        ({"grammar": ["start: a"]}, "grammar must be text"),
        ({"choice": "yes"}, "choice must be a list of texts"),
        ({"choice": []}, "choice has 0 texts"),
        ({"choice": ["a"] * 1025}, "choice has 1,025 texts"),
        ({"choice": ["a", ""]}, "choice has 0 characters"),
        ({"choice": ["a", 1]}, "choice must be text"),
        ({"allowed_sequences": "ab"}, "allowed_sequences must be a list of texts or of lists"),
        ({"allowed_sequences": []}, "allowed_sequences has 0 sequences"),
        ({"allowed_sequences": [[1]] * (2**18 + 1)}, "it must have 1 to 262,144"),
        ({"allowed_sequences": [[1], []]}, "allowed_sequences[1] is empty"),
        ({"allowed_sequences": [[1], ""]}, "allowed_sequences[1] has 0 characters"),
        ({"allowed_sequences": [[1, -2]]}, "allowed_sequences[0] must be a whole number"),
        ({"allowed_sequences": [[1, 2.5]]}, "allowed_sequences[0] must be a whole number"),
        ({"allowed_sequences": [[1] * 1025]}, "allowed_sequences[0] has more than 1,024 entries"),
        ({"allowed_sequences": ["a" * 1025]}, "allowed_sequences[0] has 1,025 characters"),
        ({"allowed_sequences": [3]}, "allowed_sequences[0] must be a list of token ids"),
        ({"allowed_sequences": [[7] * 1024] * 2049}, "tokens and characters in total"),
        ({"allowed_sequences": ["a"], "regex": "a"}, "it has regex and allowed_sequences"),
        ({"allowed_sequences": ["a"], "envelope": "start: @answer"}, "turn reasoning off"),
        ({"choice": ["a" * 40000, "b" * 40000]}, "choice has 80,000 characters in total"),
    ],
)
def test_invalid_structured_outputs_are_refused(outputs: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        StructuredOutputs(**outputs)
    assert message in str(error.value)
    assert len(str(error.value)) < 500


def test_valid_structured_outputs_are_accepted() -> None:
    assert (
        StructuredOutputs(json={"type": "object", "title": "é"}).json
        == '{"type": "object", "title": "é"}'
    )
    assert StructuredOutputs(json='{ "b": 1, "a": 2 }').json == '{ "b": 1, "a": 2 }'
    assert StructuredOutputs(json=deep(31)).json
    assert StructuredOutputs(choice=["a", "b", "a"]).choice == ["a", "b"]
    assert StructuredOutputs(choice=("x" * 65536,)).choice
    assert StructuredOutputs(regex="a") == StructuredOutputs(regex="a", json_object=False)


def test_the_digest_of_sequences_tells_them_apart() -> None:
    lists: list[list[Any]] = [
        [[1, 2], [3]],
        [[1], [2, 3]],
        [[3], [1, 2]],
        [[1, 2, 3]],
        ["ab", "c"],
        ["a", "bc"],
        ["\x01\0\0\0"],
        [[1]],
    ]
    digests = {StructuredOutputs(allowed_sequences=items).digest for items in lists}
    assert len(digests) == len(lists)
    equal = StructuredOutputs(allowed_sequences=((1, 2), (np.int64(3),)))
    assert equal.digest == StructuredOutputs(allowed_sequences=lists[0]).digest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs must be StructuredOutputs, not dict",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [2**31]}, "allowed_token_ids"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids must be a list"),
        ({"bad_words": "word"}, "bad_words must be a list of texts"),
        ({"bad_words": []}, "bad_words has 0 texts"),
        ({"bad_words": [""]}, "bad_words has 0 characters"),
        ({"bad_words": ["x"] * 1025}, "bad_words has 1,025 texts"),
        ({"bad_words": ["\ud800"]}, "bad_words is not valid Unicode"),
    ],
)
def test_invalid_allowed_tokens_and_bad_words_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**options)
    assert message in str(error.value)
