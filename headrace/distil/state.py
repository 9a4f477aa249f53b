"""The state of a training on disk: one file, replaced at once, with all that a resumed run needs.

It is a safetensors file: the weights, the optimiser's tensors, and a JSON text with the step, the
curve and what the run trains (`identity`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from headrace.checkpoint.safetensors import read_safetensors
from headrace.distil.curve import Curve, read_curve
from headrace.distil.files import disk_errors, write_safetensors
from headrace.errors import FormatError, RequestError
from headrace.quant.formats import StoredTensor
from headrace.record import frozen
from headrace.whole_file import remove_unfinished

Identity = Mapping[str, Any]
"""What a run trains, by the names of the options: JSON values."""
_RECORD = "record"
FORMAT = 1


@frozen(kw_only=True)
class Progress:
    """How far a training is."""

    step: int = 0
    """Steps done."""
    num_steps: int = 0
    """Steps in all; 0: not known yet, because the speed is still being measured."""
    seconds: float = 0.0
    loss_sum: float = 0.0
    """Sum of the losses since the last point of the curve."""
    loss_count: int = 0
    curve: Curve = Curve()


def save_state(
    path: Path, module: nn.Module, optimiser: Optimizer, progress: Progress, identity: Identity
) -> None:
    """Replace the state at once. Raises HeadraceError if the disk refuses; the old one stays."""
    facts = asdict(progress) | {"curve": progress.curve.facts()}
    text = json.dumps({"version": FORMAT, "identity": dict(identity), "progress": facts})
    arrays: dict[str, tuple[str, NDArray[Any]]] = {
        _RECORD: ("U8", np.frombuffer(text.encode(), np.uint8))
    }
    for name, parameter in module.named_parameters():
        arrays[f"weights.{name}"] = "F32", parameter.detach().numpy()
        for key, value in optimiser.state[parameter].items():
            arrays[f"optimiser.{key}.{name}"] = "F32", value.detach().numpy().reshape(-1)
    with disk_errors(path):
        write_safetensors(path, arrays)


def load_state(
    path: Path, module: nn.Module, optimiser: Optimizer, identity: Identity
) -> Progress | None:
    """Restore a training; None if there is no state.

    Raises RequestError if the state is of another training, and FormatError if it is malformed.
    """
    if not path.exists():
        return None
    remove_unfinished(path.parent)
    tensors = read_safetensors(path)
    try:
        record = json.loads(tensors.pop(_RECORD).dequantise().astype(np.uint8).tobytes())
        found = dict(record["identity"])
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(path, error) from error
    _check_same(path, found, identity)
    try:
        facts = record["progress"]
        progress = Progress(**facts | {"curve": read_curve(facts["curve"])})
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(_tensor(tensors[f"weights.{name}"]).reshape(parameter.shape))
                optimiser.state[parameter] = _optimiser_state(tensors, name, parameter)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _malformed(path, error) from error
    return progress


def _malformed(path: Path, error: Exception) -> FormatError:
    return FormatError(
        f"{path}: not the state of this training ({error}); remove the folder {path.parent.name} "
        "to start again"
    )


def _optimiser_state(
    tensors: Mapping[str, StoredTensor], name: str, parameter: Tensor
) -> dict[str, Tensor]:
    state = {}
    for full, tensor in tensors.items():
        kind, _, rest = full.partition(".")
        key, _, owner = rest.partition(".")
        if kind == "optimiser" and owner == name:
            values = _tensor(tensor)
            state[key] = values.reshape(parameter.shape if key != "step" else ())
    return state


def _tensor(stored: StoredTensor) -> Tensor:
    return torch.from_numpy(stored.dequantise().copy())


def _check_same(path: Path, found: Identity, wanted: Identity) -> None:
    """Raise RequestError if the state is of a training with other options."""
    for name, value in wanted.items():
        if found.get(name) != value:
            raise RequestError(
                f"{path.parent} has a training with another {name} ({found.get(name)!r}, and here "
                f"it is {value!r}); name another OUT, or remove {path.parent.name} to start again"
            )
