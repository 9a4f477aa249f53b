"""Structured outputs of the default model: JSON is valid by its schema, with and without
jump-forward.
"""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from headrace import LLM, SamplingParams, StructuredOutputs
from headrace.backend import compile_program
from headrace.errors import RequestError
from headrace.model import trace_model
from tests.engine.test_promise import same
from tests.engine.test_promise_real import KV, checkpoint, engine_on
from tests.tiny import run_all


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT = {"type": "string", "maxLength": 24}
ADDRESS = record(street=TEXT, number={"type": "integer", "minimum": 1, "maximum": 400})
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": record(name=TEXT, address=ADDRESS, member={"type": "boolean"}),
    "arrays": record(
        tags={"type": "array", "items": TEXT, "minItems": 2, "maxItems": 3},
        grid={"type": "array", "items": {"enum": [0, 1]}, "maxItems": 4},
    ),
    "enums": record(
        colour={"enum": ["red", "green", "dark blue"]},
        size={"enum": [1, 2.5, None]},
        kind={"const": "shirt"},
    ),
    "references": {
        "$defs": {"address": ADDRESS},
        **record(home={"$ref": "#/$defs/address"}, work={"$ref": "#/$defs/address"}),
    },
    "any of": record(
        id={
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 9999},
                {"type": "string", "pattern": "^[a-z]{3,8}$"},
            ]
        }
    ),
    "patterns": record(
        date={"type": "string", "format": "date"},
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    ),
    "bounds": record(
        age={"type": "integer", "exclusiveMinimum": 17, "maximum": 99},
        share={"type": "number", "minimum": 0, "maximum": 1},
    ),
    "optional": {**record(a=TEXT, b=TEXT, c={"type": "null"}), "required": ["b"]},
}


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"]
)
def test_json_is_valid_by_its_schema(sampling: dict[str, Any]) -> None:
    model, tokenizer = checkpoint()
    executable = compile_program(
        "cpu", trace_model(model.spec, model.tensors), model.tensors, KV, 1
    )
    requests = []
    for name, schema in SCHEMAS.items():
        prompt = tokenizer.encode(
            f"<|im_start|>user\nAnswer in JSON: {name}<|im_end|>\n<|im_start|>assistant\n",
            parse_special=True,
        )
        asked = StructuredOutputs(json=schema)
        requests.append(
            (
                prompt,
                SamplingParams(max_tokens=90, logprobs=0, structured_outputs=asked, **sampling),
            )
        )
    jumping, one_by_one = (
        engine_on(executable, proposer="suffix"),
        engine_on(executable, jump_forward=False),
    )
    results, expected = run_all(jumping, requests), run_all(one_by_one, requests)
    cut = 0
    for schema, result, other in zip(SCHEMAS.values(), results, expected, strict=True):
        same(result, other, exact=True)
        if result.outputs[0].finish_reason == "length":
            cut += 1
        else:
            jsonschema.validate(json.loads(result.outputs[0].text), schema)
    assert cut <= 1
    assert jumping.stats().forced > 50 and one_by_one.stats().forced == 0
    executable.close()


def test_structured_outputs_through_every_interface() -> None:
    choice = ["the sun", "the moon", "neither of them"]
    params = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputs(choice=choice)
    )
    question = [{"role": "user", "content": "Which is larger?"}]
    with LLM("smollm2", max_model_len=256, kv_blocks=16) as llm:
        (answer,) = llm.chat(question, params)
        (text,) = llm.generate("Which is larger?", params)
        assert answer.outputs[0].text in choice and text.outputs[0].text in choice
        assert "".join(llm.stream_text(question, params)) == answer.outputs[0].text
        with pytest.raises(RequestError, match="regex cannot be compiled"):
            llm.generate("a", replace(params, structured_outputs=StructuredOutputs(regex="(")))
