"""Options of speculative decoding as other engines write them."""

import json
import logging
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.errors import RequestError
from headrace.loader.options import engine_config
from headrace.loader.peer_options import PEER_FLAGS, PEER_OPTIONS


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (
            {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3},
            {"proposer": "draft_model", "draft_model": "org/head", "draft_depth": 3},
        ),
        (
            {"model": "small", "num_speculative_tokens": 5},
            {"proposer": "draft_model", "draft_model": "small", "draft_depth": 5},
        ),
        (
            {"method": "deepseek_mtp", "num_speculative_tokens": 1},
            {"proposer": "draft_model", "draft_model": "mtp", "draft_depth": 1},
        ),
        (
            {"method": "medusa", "model": "heads", "num_speculative_tokens": 4},
            {"proposer": "medusa", "medusa_heads": "heads", "draft_depth": 4},
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
            {"proposer": "suffix", "max_draft_tokens": 5},
        ),
        (
            {"model": "[ngram]", "num_speculative_tokens": 5},
            {"proposer": "suffix", "max_draft_tokens": 5},
        ),
        ({"method": "suffix", "quantization": None}, {"proposer": "suffix"}),
    ],
)
def test_speculative_config_of_vllm_is_read(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert engine_config({"speculative_config": given}) == engine_config(ours)
    text = json.dumps(given)
    assert engine_config({"speculative_config": text, "proposer": "auto"}) == engine_config(ours)


def test_speculative_config_without_a_value_changes_nothing() -> None:
    assert engine_config({"speculative_config": ""}) == engine_config({})
    assert engine_config({"speculative_config": None}) == engine_config({})


def test_bounds_of_ngrams_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headrace.loader"):
        engine_config({"speculative_config": {"method": "ngram", "prompt_lookup_min": 2}})
    assert "speculative_config.prompt_lookup_min is not needed" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": "eagle3"}, "speculative_config is no JSON object; write it as"),
        ({"speculative_config": [1]}, "speculative_config is no JSON object"),
        ({"speculative_config": {"method": "dflash", "model": "m"}}, "method 'dflash' is not"),
        ({"speculative_config": {}}, "speculative_config.method '' is not supported; choose from"),
        ({"speculative_config": {"method": "eagle3"}}, "speculative_config.model is missing, and"),
        (
            {"speculative_config": {"method": "mtp", "draft_tensor_parallel_size": 2}},
            "speculative_config.draft_tensor_parallel_size has no counterpart here; leave it out",
        ),
        (
            {"speculative_config": {"model": "a"}, "draft_model": "b"},
            "draft_model is in speculative_config too; leave one out",
        ),
        (
            {"speculative_config": {"method": "mtp"}, "proposer": "suffix"},
            "proposer is in speculative_config too; leave one out",
        ),
        (
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 0}},
            "draft_depth must be a whole number from 1 to 64, not 0",
        ),
        (
            {"assistant_model": "small"},
            "option 'assistant_model' belongs to another engine; set draft_model",
        ),
        (
            {"prompt_lookup_num_tokens": 10},
            "set max_draft_tokens, with proposer suffix",
        ),
    ],
)
def test_options_without_a_counterpart_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        engine_config(options)
    assert message in str(error.value)


def test_every_option_of_a_peer_is_refused_by_name() -> None:
    for name, ours in PEER_OPTIONS.items():
        with pytest.raises(RequestError, match=f"{name}.* set {ours.split()[0]}"):
            engine_config({name: 1})


@pytest.mark.parametrize("flag", PEER_FLAGS)
def test_flags_of_peers_name_ours(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smollm2", "hello", f"{flag}=3"]) == 2
    assert f"(here it is {PEER_FLAGS[flag]})" in capsys.readouterr().err


def test_speculative_config_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run", "smollm2", "Hi"], ["serve", "smollm2"]):
        assert main([*command, "--speculative-config", '{"method": "dflash"}']) == 2
        assert "speculative_config.method 'dflash' is not supported" in capsys.readouterr().err
