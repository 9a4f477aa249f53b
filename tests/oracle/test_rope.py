"""Rules for rotary frequencies in files and model cards: logits against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from headrace.checkpoint.load import open_checkpoint
from headrace.loader.load import open_model
from headrace.loader.options import engine_config
from tests.families import CONTEXT, LLAMA3, VOCAB, logits_of, save_model
from tests.oracle.test_families import near, rows_of_ours

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 120).tolist()
SHORT = 32
"""The trained context, which TOKENS exceed."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": SHORT}
LONG = {"short_factor": [1.0] * 8, "long_factor": [1 + i / 2 for i in range(8)]}

CASES: dict[str, tuple[dict[str, Any], int]] = {
    "yarn by card": ({"rope_scaling": YARN}, 128),
    "yarn by card, old key": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        128,
    ),
    "yarn with a longer file": ({"rope_scaling": YARN, "max_position_embeddings": 40}, 128),
    "yarn, own factor": ({"rope_scaling": YARN | {"attention_factor": 0.8}}, 128),
    "yarn, mscale": ({"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}}, 128),
    "yarn, limits": ({"rope_scaling": YARN | {"beta_fast": 8.0, "beta_slow": 0.5}}, 128),
    "yarn, exact limits": ({"rope_scaling": YARN | {"truncate": False}}, 128),
    "yarn, no original": ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, 256),
    "yarn in rope_parameters": ({"rope_parameters": YARN | {"rope_theta": 500.0}}, 128),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 128),
    "llama3": ({"rope_scaling": LLAMA3, "max_position_embeddings": 256}, 256),
    "longrope": (
        {"rope_scaling": LONG | {"rope_type": "longrope", "factor": 4.0}}
        | {"original_max_position_embeddings": 32, "max_position_embeddings": 128},
        128,
    ),
    "default": ({"rope_scaling": {"rope_type": "default"}, "max_position_embeddings": 128}, 128),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama2-mha", folder)
    return folder


def changed(folder: Path, change: dict[str, Any]) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text())
    if "rope_parameters" not in change:
        del values["rope_parameters"]
    values |= {"max_position_embeddings": SHORT, "rope_theta": 1e4} | change
    file.write_text(json.dumps(values))


@pytest.mark.parametrize("name", CASES)
def test_logits_beyond_the_trained_context(name: str, made: Path) -> None:
    change, context = CASES[name]
    original = (made / "config.json").read_text()
    try:
        changed(made, change)
        checkpoint = open_checkpoint(made)
        model = transformers.AutoModelForCausalLM.from_pretrained(made)
    finally:
        (made / "config.json").write_text(original)
    assert checkpoint.spec.max_context == context
    got, _ = rows_of_ours(checkpoint.spec, checkpoint.tensors, TOKENS, 1, "cpu")
    assert near(got, logits_of(model.eval(), TOKENS))


OPTIONS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"rope_scaling": "yarn", "rope_scale": 4}, {"rope_scaling": YARN}, 128),
    (
        {"rope_scaling": "yarn", "rope_scale": 8, "yarn_orig_ctx": 16},
        {"rope_scaling": YARN | {"factor": 8.0, "original_max_position_embeddings": 16}},
        128,
    ),
    ({"rope_scaling": YARN}, {"rope_scaling": YARN}, 128),
    ({"rope_scale": 4}, {"rope_scaling": {"type": "linear", "factor": 4.0}}, 128),
    (
        {"rope_scaling": "linear", "rope_scale": 4, "rope_theta": 500},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0},
        128,
    ),
    ({"rope_theta": 500}, {"rope_theta": 500.0, "rope_scaling": None}, SHORT),
]


@pytest.mark.parametrize(("options", "config", "context"), OPTIONS)
def test_options_give_the_model_that_a_changed_file_gives(
    options: dict[str, Any], config: dict[str, Any], context: int, made: Path
) -> None:
    original = (made / "config.json").read_text()
    try:
        changed(made, {})
        ours = open_model(str(made), engine_config(options))
        (made / "config.json").write_text(original)
        changed(made, config)
        assert ours.spec == open_model(str(made), engine_config({})).spec
    finally:
        (made / "config.json").write_text(original)
    assert ours.spec.max_context == context == ours.spec.context


def test_none_takes_a_rule_away(made: Path) -> None:
    original = (made / "config.json").read_text()
    try:
        changed(made, {"rope_scaling": YARN, "max_position_embeddings": 128})
        spec = open_model(str(made), engine_config({"rope_scaling": "none"})).spec
    finally:
        (made / "config.json").write_text(original)
    assert spec.rope and (spec.rope.scaling, spec.max_context) == ("none", SHORT)
    assert CONTEXT > SHORT
