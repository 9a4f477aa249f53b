"""Reads options of speculative decoding as vLLM writes them, and names ours for those of others."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from headrace.errors import RequestError

_log = logging.getLogger("headrace.loader")

_DRAFTERS = ("draft_model", "eagle", "eagle3")
_OWN_LAYERS = ("mtp", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "ernie_mtp", "qwen3_next_mtp")
_SUFFIX = ("ngram", "ngram_gpu", "suffix", "[ngram]")
_BOUNDS = ("prompt_lookup_max", "prompt_lookup_min")
"""Bounds of an n-gram, which the suffix tree does not need: it weighs matches of all lengths."""
_READ = ("method", "model", "num_speculative_tokens", *_BOUNDS)

PEER_OPTIONS: dict[str, str] = {
    "assistant_model": "draft_model",
    "assistant_tokenizer": "draft_model, whose files have the tokenizer",
    "assistant_early_exit": "draft_layers, with proposer self_draft",
    "num_assistant_tokens": "draft_depth",
    "num_assistant_tokens_schedule": "adaptive_speculation, which is on by default",
    "assistant_confidence_threshold": "adaptive_speculation, which is on by default",
    "assistant_lookbehind": "draft_model alone: texts are cut again up to a fixed number of tokens",
    "target_lookbehind": "draft_model alone: texts are cut again up to a fixed number of tokens",
    "prompt_lookup_num_tokens": "max_draft_tokens, with proposer suffix",
    "max_matching_ngram_size": "proposer suffix, which weighs matches of all lengths",
    "speculative_model": "draft_model",
    "num_speculative_tokens": "draft_depth",
}
"""Options of transformers and of earlier vLLM, and what to set here."""

PEER_FLAGS: dict[str, str] = {
    "--model-draft": "--draft-model",
    "-md": "--draft-model",
    "--draft-max": "--draft-depth",
    "--draft": "--draft-depth",
    "--draft-n": "--draft-depth",
    "--draft-min": "--adaptive-speculation",
    "--draft-p-min": "--adaptive-speculation",
    "--assistant-model": "--draft-model",
    "--speculative-model": "--draft-model",
    "--num-speculative-tokens": "--draft-depth",
    "--speculative-algorithm": "--proposer",
    "--speculative-draft-model-path": "--draft-model",
    "--speculative-num-steps": "--draft-depth",
    "--speculative-eagle-topk": "--draft-width",
    "--speculative-num-draft-tokens": "--max-draft-tokens",
}
"""Flags of llama.cpp, vLLM and SGLang, and ours."""


def check_peer_options(options: Mapping[str, Any]) -> None:
    """Raise RequestError for an option of another engine, with the option to set."""
    for name in options:
        if ours := PEER_OPTIONS.get(name):
            raise RequestError(f"option {name!r} belongs to another engine; set {ours}")


def with_speculative_config(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Spread a `speculative_config` in the form of vLLM, a mapping or JSON, over options.

    Raises RequestError for a method or a field without a counterpart.
    """
    if "speculative_config" not in options:
        return options
    rest = {name: value for name, value in options.items() if name != "speculative_config"}
    given = options["speculative_config"]
    if given in (None, ""):
        return rest
    spread = _spread(_mapping(given))
    twice: list[str] = [
        name
        for name in ("draft_model", "medusa_heads")
        if name in spread and rest.get(name) not in (None, "")
    ]
    if rest.get("proposer", "off") not in ("off", "auto", spread["proposer"]):
        twice.append("proposer")
    if twice:
        raise RequestError(f"{twice[0]} is in speculative_config too; leave one out")
    return rest | spread


def _mapping(given: Any) -> Mapping[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = None
    if not isinstance(given, Mapping):
        raise RequestError(
            "speculative_config is no JSON object; write it as "
            '{"method": "eagle3", "model": "FOLDER", "num_speculative_tokens": 4}'
        )
    return given


def _spread(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our options for the fields of vLLM's record."""
    for name, value in config.items():
        if name not in _READ and value is not None:
            raise RequestError(
                f"speculative_config.{str(name)[:80]} has no counterpart here; leave it out"
            )
    model = config.get("model")
    method = config.get("method") or ("draft_model" if model else "")
    if model in _SUFFIX and not config.get("method"):
        method, model = "ngram", None
    count = config.get("num_speculative_tokens")
    depth = {} if count is None else {"draft_depth": count}

    if method in _SUFFIX:
        if bounds := [name for name in _BOUNDS if config.get(name) is not None]:
            _log.warning(
                "speculative_config.%s is not needed: the suffix tree weighs matches of all "
                "lengths",
                bounds[0],
            )
        return {"proposer": "suffix"} | ({} if count is None else {"max_draft_tokens": count})
    if method in _OWN_LAYERS:
        return {"proposer": "draft_model", "draft_model": "mtp"} | depth
    option = {"medusa": "medusa_heads"}.get(method, "draft_model" if method in _DRAFTERS else "")
    if not option:
        known = ", ".join([*_DRAFTERS, "mtp", "medusa", "ngram", "suffix"])
        raise RequestError(
            f"speculative_config.method {str(method)[:80]!r} is not supported; choose from {known}"
        )
    if not isinstance(model, str) or not model:
        raise RequestError(
            f"speculative_config.model is missing, and method {method!r} needs it; set the folder "
            "or the name of the drafter"
        )
    proposer = "medusa" if option == "medusa_heads" else "draft_model"
    return {"proposer": proposer, option: model} | depth
