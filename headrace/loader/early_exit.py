"""Reads the calibration file of an early exit."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.errors import FormatError, RequestError
from headrace.loader.calibration_file import check_calibrated_model, finite, read_calibration
from headrace.loader.exit_map import parse_exit_map
from headrace.model.spec import EarlyExit, ModelSpec

KIND = "early_exit"
_COMMAND = "headrace calibrate MODEL --early-exit 0.05"


def check_early_exit(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raise an error if the file of an early exit does not suit the model or other options.

    `checkpoint` is the model as it was opened, without options that change it.
    """
    if not config.early_exit:
        return
    facts = _read(config)
    early_exit = _parse(config, facts)
    check_calibrated_model("early_exit", config.early_exit, facts, checkpoint, _COMMAND)
    if early_exit.num_layers >= checkpoint.spec.num_layers:
        raise FormatError(
            f"early_exit {config.early_exit!r} leaves after {early_exit.num_layers} layers, and "
            f"the model has {checkpoint.spec.num_layers}; make one with `{_COMMAND}`"
        )
    if config.pipeline_parallel_size > 1:
        raise RequestError(
            "early_exit needs all layers in one pipeline stage; set pipeline_parallel_size to 1, "
            "or leave early_exit out"
        )


def with_exit_map(checkpoint: Checkpoint, config: EngineConfig) -> Checkpoint:
    """Add the linear map of the exit to the tensors, if the file has one. Raises FormatError."""
    if not config.early_exit:
        return checkpoint
    facts = _read(config)
    if "map" not in facts:
        return checkpoint
    where, remedy = f"early_exit {config.early_exit!r}", f"make one with `{_COMMAND}`"
    found = parse_exit_map(where, facts["map"], checkpoint.spec.dim, remedy)
    name = _parse(config, facts).map_name
    return replace(checkpoint, tensors={**checkpoint.tensors, **found.tensors(name)})


def with_early_exit(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """Return the model with the exit of the configuration, if it has one."""
    if not config.early_exit:
        return spec
    return replace(spec, early_exit=_parse(config, _read(config)))


def _read(config: EngineConfig) -> dict[str, Any]:
    return read_calibration("early_exit", config.early_exit, KIND, _COMMAND)


def _parse(config: EngineConfig, facts: Mapping[str, Any]) -> EarlyExit:
    layers, given = facts.get("layers"), facts.get("min_margin")
    if type(layers) is not int or layers < 1:
        raise FormatError(
            f"early_exit {config.early_exit!r} has layers {layers!r}, not a number of first "
            f"layers; make one with `{_COMMAND}`"
        )
    margin = finite(given)
    if margin is None or margin < 0:
        raise FormatError(
            f"early_exit {config.early_exit!r} has min_margin {given!r}, not a difference of "
            f"probabilities; make one with `{_COMMAND}`"
        )
    return EarlyExit(layers, margin)
