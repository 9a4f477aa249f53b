"""Calibration files of lossy modes: JSON with the mode's numbers, its model and its price."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.checkpoint.load import Checkpoint
from headrace.errors import FormatError, ModelNotFoundError, RequestError

_VERSION = 1


def write_calibration(path: Path, kind: str, model: str, facts: Mapping[str, Any]) -> None:
    """Write a file. `model` is the fingerprint. Raises RequestError if it cannot be written."""
    content = {"kind": kind, "version": _VERSION, "model": model, **facts}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; choose a file that you may write") from None


def read_calibration(option: str, path: str, kind: str, command: str) -> dict[str, Any]:
    """Read the file that an option names.

    `command` makes such a file. Raises ModelNotFoundError if there is no file, and FormatError if
    it is malformed or of another kind.
    """
    remedy = f"make one with `{command}`"
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFoundError(f"{option} {path!r}: {error.strerror}; {remedy}") from None
    except (ValueError, RecursionError):
        raise FormatError(f"{option} {path!r} is not JSON; {remedy}") from None
    if not isinstance(facts, dict) or facts.get("kind") != kind:
        found = facts.get("kind") if isinstance(facts, dict) else None
        what = f"the kind {found!r}" if found else "no kind"
        raise FormatError(f"{option} {path!r} has {what}, not {kind!r}; {remedy}")
    if facts.get("version") != _VERSION:
        raise FormatError(
            f"{option} {path!r} has version {facts.get('version')!r}, and this Headrace reads "
            f"version {_VERSION}; {remedy}"
        )
    return facts


def check_calibrated_model(
    option: str, path: str, model: object, checkpoint: Checkpoint, command: str
) -> None:
    """Raise RequestError if `model`, the fingerprint in a file, is not that of `checkpoint`."""
    from headrace.checkpoint.fingerprint import fingerprint

    if model != fingerprint(checkpoint, checkpoint.load_tokenizer()):
        raise RequestError(
            f"{option} {path!r} was calibrated for another model or another number format of it; "
            f"make one for this model with `{command}`"
        )


def finite(value: object) -> float | None:
    """The value of a field as a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
