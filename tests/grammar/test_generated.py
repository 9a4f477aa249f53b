"""Generated schemas and random weights: every output is valid by its schema."""

from importlib import import_module
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams, StructuredOutputs
from tests.checkpoint.conftest import write_tiny_gguf

SCHEMAS = 30
FOLDER = Path(__file__).parents[2] / "benchmarks/structured"


def test_outputs_follow_generated_schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    generator = import_module("generator")
    schemas = [generator.schema_of(seed) for seed in range(SCHEMAS)]
    kinds = str(schemas)
    assert all(
        repr(kind) in kinds
        for kind in (
            "$ref",
            "anyOf",
            "enum",
            "const",
            "pattern",
            "format",
            "items",
            "minimum",
            "maxLength",
        )
    )
    params = [
        SamplingParams(
            max_tokens=1000,
            temperature=t,
            seed=seed,
            structured_outputs=StructuredOutputs(json=schema),
        )
        for seed, schema in enumerate(schemas)
        for t in (0.0, 1.0)
    ]
    with LLM(
        write_tiny_gguf(tmp_path / "tiny.gguf", {"llama.context_length": 2048}), threads=1
    ) as llm:
        outputs = [result.outputs[0] for result in llm.generate(["hello"] * len(params), params)]
    faults = [
        generator.fault(output.text, schemas[i // 2])
        for i, output in enumerate(outputs)
        if output.finish_reason != "length"
    ]
    assert set(faults) == {None} and len(faults) > 0.95 * len(outputs)
