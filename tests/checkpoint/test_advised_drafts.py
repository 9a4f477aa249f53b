"""Advice about drafts in generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.advised_drafts import draft_notes

DEFAULTS = {
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "target_lookbehind": 10,
    "prompt_lookup_num_tokens": None,
}


@pytest.mark.parametrize("given", [{}, DEFAULTS, {"num_assistant_tokens": 5}])
def test_values_that_transformers_always_writes_advise_nothing(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    assert draft_notes(tmp_path) == []
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert draft_notes(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("assistant_early_exit", 4, "set proposer to self_draft and draft_layers to 4"),
        ("prompt_lookup_num_tokens", 10, "set proposer to suffix and max_draft_tokens to 10"),
        ("num_assistant_tokens", 8, "set draft_depth to 8"),
        ("num_assistant_tokens_schedule", "heuristic_transient", "need no such value"),
        ("assistant_confidence_threshold", 0.6, "need no such value"),
        ("assistant_lookbehind", 4, "need no such value"),
        ("target_lookbehind", 4, "need no such value"),
    ],
)
def test_advice_names_our_option(tmp_path: Path, name: str, value: Any, remedy: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(DEFAULTS | {name: value}))
    (note,) = draft_notes(tmp_path)
    assert f"generation_config.json: {name} is {value!r}: " in note and remedy in note
