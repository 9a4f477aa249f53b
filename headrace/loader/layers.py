"""Reads a choice of layers: a number of first layers, or a list."""

import re
import reprlib
from collections.abc import Sequence
from itertools import pairwise

from headrace.errors import RequestError
from headrace.validation import integer

MAX_LAYERS = 4096
_PART = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def layer_choice(name: str, value: object) -> int | tuple[int, ...]:
    """Return the number of first layers, or ascending layers from 0.

    As text, `12` is a number, and `0-9,14,29` has ranges and single layers. Raises RequestError.
    """
    if isinstance(value, str):
        listed = _read(value)
        if value.isdecimal() and len(value) < 5:
            return integer(name, int(value), 0, MAX_LAYERS)
    elif isinstance(value, Sequence):
        listed = [integer(name, layer, 0, MAX_LAYERS - 1) for layer in value]
    else:
        return integer(name, value, 0, MAX_LAYERS)

    if not listed or any(layer >= above for layer, above in pairwise(listed)):
        raise RequestError(
            f"{name} must be a number of first layers, or ascending layers such as 0-9,14,29, not "
            f"{reprlib.repr(value)}"
        )
    return tuple(listed)


def _read(text: str) -> list[int]:
    """The layers of a text; none if it is malformed."""
    layers: list[int] = []
    for word in text.split(","):
        found = _PART.fullmatch(word.strip())
        if not found:
            return []
        first = int(found[1])
        layers += range(first, int(found[2] or first) + 1)
    return layers


def layers_text(layers: Sequence[int]) -> str:
    """The text of a list of layers, with ranges: `0-9,14,29`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    text = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return text if len(layers) != 1 else f"{text}-{text}"
