"""Reads the calibration file of an early exit."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.errors import FormatError, RequestError
from headrace.loader.calibration_file import check_calibrated_model, finite, read_calibration
from headrace.loader.exit_map import decoded_parts, parse_exit_map
from headrace.model.spec import EarlyExit, ModelSpec
from headrace.planner.prices import Price, parse_price
from headrace.record import frozen

KIND = "early_exit"
_COMMAND = "headrace calibrate MODEL --early-exit 0.05"


@frozen(eq=False)
class ExitFile:
    """The contents of a file of `headrace calibrate --early-exit`."""

    model: object
    """Fingerprint."""
    early_exit: EarlyExit
    map_parts: Mapping[str, bytes] | None
    """See `parse_exit_map`; None without a map."""
    price: Price | None


def check_early_exit(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raise an error if the file of an early exit does not suit the model or other options.

    `checkpoint` is the model as it was opened, without options that change it.
    """
    if not config.early_exit:
        return
    file = read_exit_file(config.early_exit)
    check_calibrated_model("early_exit", config.early_exit, file.model, checkpoint, _COMMAND)
    if file.early_exit.num_layers >= checkpoint.spec.num_layers:
        raise FormatError(
            f"early_exit {config.early_exit!r} leaves after {file.early_exit.num_layers} layers, "
            f"and the model has {checkpoint.spec.num_layers}; make one with `{_COMMAND}`"
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
    file = read_exit_file(config.early_exit)
    if file.map_parts is None:
        return checkpoint
    where, remedy = f"early_exit {config.early_exit!r}", f"make one with `{_COMMAND}`"
    found = parse_exit_map(where, file.map_parts, checkpoint.spec.dim, remedy)
    added = found.tensors(file.early_exit.map_name)
    return replace(checkpoint, tensors={**checkpoint.tensors, **added})


def with_early_exit(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """Return the model with the exit of the configuration, if it has one."""
    if not config.early_exit:
        return spec
    return replace(spec, early_exit=read_exit_file(config.early_exit).early_exit)


def read_exit_file(path: str) -> ExitFile:
    """Read a file, once as long as it does not change.

    Several parts of an engine need the file, and its map may have megabytes.
    Raises ModelNotFoundError and FormatError.
    """
    version = (0, 0, 0)
    with suppress(OSError):  # reading raises it, with the remedy
        status = os.stat(path)
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
    return _read(path, version)


@lru_cache(maxsize=2)
def _read(path: str, version: tuple[int, int, int]) -> ExitFile:
    facts = read_calibration("early_exit", path, KIND, _COMMAND)
    return ExitFile(
        model=facts.get("model"),
        early_exit=_parse(path, facts),
        map_parts=decoded_parts(facts["map"]) if "map" in facts else None,
        price=parse_price(facts.get("price")),
    )


def _parse(path: str, facts: Mapping[str, Any]) -> EarlyExit:
    layers, given = facts.get("layers"), facts.get("min_margin")
    if type(layers) is not int or layers < 1:
        raise FormatError(
            f"early_exit {path!r} has layers {layers!r}, not a number of first layers; make one "
            f"with `{_COMMAND}`"
        )
    margin = finite(given)
    if margin is None or margin < 0:
        raise FormatError(
            f"early_exit {path!r} has min_margin {given!r}, not a difference of probabilities; "
            f"make one with `{_COMMAND}`"
        )
    return EarlyExit(layers, margin)
