"""The shape of a smaller model of a family, and its first weights: parts of the large model's.

Depth is pruned by layers, width by columns of the residual stream, whole groups of heads and
neurons of the MLPs. The kept columns have the most energy in recorded rows; the kept heads and
neurons have the largest weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.folder import open_folder
from headrace.checkpoint.load import Checkpoint
from headrace.convert.folder.config import checked_config, config_json
from headrace.errors import RequestError, UnsupportedModelError
from headrace.model import FAMILIES, tensor_shapes
from headrace.model.spec import ModelSpec
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

_WIDTH_STEP = 32
"""Widths are multiples: the number of weights with one scale in most formats."""
_ROWS = {
    "q": "heads", "q_bias": "heads", "k": "kv", "k_bias": "kv", "v": "kv", "v_bias": "kv",
    "gate": "ffn", "gate_bias": "ffn", "up": "ffn", "up_bias": "ffn",
    "o": "dim", "o_bias": "dim", "down": "dim", "down_bias": "dim",
    "attn_norm": "dim", "attn_norm_bias": "dim", "mlp_norm": "dim", "mlp_norm_bias": "dim",
    "attn_post_norm": "dim", "mlp_post_norm": "dim", "norm": "dim", "norm_bias": "dim",
    "embed": "all", "head": "all", "head_bias": "all", "q_norm": "all", "k_norm": "all",
}  # fmt: skip
"""The kind of the rows of each tensor, or of the entries of a vector."""
_COLUMNS = {"o": "heads", "down": "ffn"}
"""The kind of the columns of a matrix; others have columns of the residual stream."""
_NUM_TAPS = 4
_NORMS = ("attn_norm", "mlp_norm", "norm")
"""Norms of the residual stream."""


@frozen(kw_only=True)
class Shape:
    """The parts of a model that a smaller model begins with."""

    layers: tuple[int, ...]
    """Layers of the large model, ascending."""
    dim: int
    num_kv_heads: int
    ffn_dim: int


def evenly_spaced(num_layers: int, count: int) -> tuple[int, ...]:
    """Choose `count` of the layers, the first and the last among them."""
    if count == 1:
        return (num_layers - 1,)
    return tuple(round(i * (num_layers - 1) / (count - 1)) for i in range(count))


def student_shape(
    spec: ModelSpec, layers: Sequence[int] | int, width: int = 0, ffn_width: int = 0
) -> Shape:
    """Choose the shape of a student with these layers, or this number of layers.

    `width` 0 keeps the width, `ffn_width` 0 changes the MLPs in the same ratio. Raises RequestError
    for numbers that do not fit, UnsupportedModelError for a model that cannot be pruned so.
    """
    count = spec.num_layers
    if isinstance(layers, int):
        if not 1 <= layers <= count:
            raise RequestError(f"layers is {layers}, and the model has {count}; use 1 to {count}")
        layers = evenly_spaced(count, layers)
    if (
        not layers
        or list(layers) != sorted(set(layers))
        or not 0 <= layers[0] <= layers[-1] < count
    ):
        raise RequestError(
            f"layers {list(layers)} are not ascending numbers from 0 to {count - 1}, the layers "
            "of the model; correct them"
        )
    width, ffn_width = width or spec.dim, ffn_width or _share(spec.ffn_dim, width, spec.dim)
    for name, value, limit in (("width", width, spec.dim), ("ffn_width", ffn_width, spec.ffn_dim)):
        if value > limit or (value != limit and value % _WIDTH_STEP):
            raise RequestError(
                f"{name} is {value:,}; it must be a multiple of {_WIDTH_STEP} below the model's "
                f"{limit:,}"
            )
    groups = spec.num_kv_heads
    if width != spec.dim:
        groups = max(1, round(groups * width / spec.dim))
    shape = Shape(layers=tuple(layers), dim=width, num_kv_heads=groups, ffn_dim=ffn_width)
    if len(layers) == count and width == spec.dim and ffn_width == spec.ffn_dim:
        raise RequestError(
            "the student would be the model itself; choose fewer layers, or a smaller width"
        )
    _check_family(spec, shape)
    return shape


def _share(size: int, width: int, whole: int) -> int:
    """The part of a size that keeps its ratio to the width, rounded to the step."""
    if width in (0, whole):
        return size
    return min(size, max(1, round(size * width / whole / _WIDTH_STEP)) * _WIDTH_STEP)


def _check_family(spec: ModelSpec, shape: Shape) -> None:
    is_narrower = shape.dim != spec.dim or shape.ffn_dim != spec.ffn_dim
    parts = {name.rpartition(".")[2] for name in tensor_shapes(spec)}
    if spec.mla or spec.experts:
        raise UnsupportedModelError(
            f"a {spec.architecture} model with experts or latent attention has no smaller form "
            "here; choose a dense model"
        )
    if is_narrower and (parts - _ROWS.keys() or spec.qk_norm in ("row", "heads")):
        raise UnsupportedModelError(
            f"a {spec.architecture} model cannot be made narrower here; leave out --width and "
            "--ffn-width, and choose --layers"
        )


def student_spec(spec: ModelSpec, shape: Shape) -> ModelSpec:
    """The specification of the student."""
    heads = shape.num_kv_heads * (spec.num_heads // spec.num_kv_heads)
    return replace(
        spec,
        num_layers=len(shape.layers),
        dim=shape.dim,
        num_heads=heads,
        num_kv_heads=shape.num_kv_heads,
        ffn_dim=shape.ffn_dim,
        windows=tuple(spec.windows[i] for i in shape.layers) if spec.windows else (),
        rotated=tuple(spec.rotated[i] for i in shape.layers) if spec.rotated else (),
        context=0,
    )


def student_config(checkpoint: Checkpoint, shape: Shape) -> dict[str, Any]:
    """Make the `config.json` of the student. Raises UnsupportedModelError."""
    small = student_spec(checkpoint.spec, shape)
    layout = FAMILIES[small.architecture].config
    if layout is None or not checkpoint.path.is_dir():
        return config_json(small)
    config = dict(open_folder(checkpoint.path).config.items())
    for name in ("quantization_config", "compression_config", "quantization"):
        config.pop(name, None)
    changes = {
        "num_hidden_layers": small.num_layers,
        "hidden_size": small.dim,
        "intermediate_size": small.ffn_dim,
        "num_attention_heads": small.num_heads,
        "num_key_value_heads": small.num_kv_heads,
        "head_dim": small.head_dim,
    }
    for name, value in changes.items():
        own = layout.fields.get(name, name)
        if own in config or small.dim != checkpoint.spec.dim:
            config[own] = value
    for name, value in config.items():
        if isinstance(value, list) and len(value) == checkpoint.spec.num_layers:
            config[name] = [value[i] for i in shape.layers]
    return checked_config(replace(small, early_exit=None), layout, config)


def row_places(shape: Shape) -> tuple[int, ...]:
    """Layers of the student, in its numbers, whose input is compared with the teacher's rows."""
    last = len(shape.layers) - 1
    count = min(_NUM_TAPS, last)
    return tuple(sorted({max(1, round((i + 1) * last / count)) for i in range(count)}))


def default_taps(shape: Shape, num_layers: int) -> tuple[int, ...]:
    """The layers of the teacher before which rows are recorded: the same layers, and the end."""
    return (*(shape.layers[place] for place in row_places(shape)), num_layers)


class Energy:
    """The energy of each column of the residual stream, measured on recorded rows."""

    def __init__(self, dim: int, layers: Sequence[int]) -> None:
        """`layers`: the layers before which the rows are taken."""
        self._layers = np.array(layers)
        self._sums = np.zeros((len(layers), dim))

    def add(self, taps: Floats) -> None:
        """Add rows [rows, layers * dim]."""
        parts = taps.reshape(len(taps), *self._sums.shape)
        self._sums += np.square(parts, dtype=np.float64).sum(axis=0)

    def kept(self, count: int) -> Indices:
        """The columns with the most energy, ascending. Each layer has the same say."""
        shares = self._sums / self._sums.sum(axis=1, keepdims=True)
        return np.sort(np.argsort(-shares.sum(axis=0), kind="stable")[:count])

    def norm_factor(self, layer: int, kept: Indices) -> float:
        """The factor of a norm before a layer that keeps its output on these columns."""
        sums = self._sums[np.abs(self._layers - layer).argmin()]
        return float(np.sqrt(sums[kept].mean() / sums.mean()))


def student_tensors(
    checkpoint: Checkpoint, shape: Shape, energy: Energy
) -> dict[str, StoredTensor]:
    """Prune the tensors of a model, by the names of the student."""
    spec, tensors = checkpoint.spec, checkpoint.tensors
    small = student_spec(spec, shape)
    is_narrower = shape.dim != spec.dim or shape.ffn_dim != spec.ffn_dim
    columns = energy.kept(shape.dim)
    result = {}
    for name in tensor_shapes(small):
        prefix, _, part = name.rpartition(".")
        layer = shape.layers[int(prefix.split(".")[1])] if prefix else spec.num_layers
        source = f"layers.{layer}.{part}" if prefix else name
        values = tensors[source].dequantise()
        if is_narrower:
            kept = {"dim": columns}
            if prefix:
                kept |= _kept_heads(tensors, spec, shape, layer)
                kept["ffn"] = _kept_neurons(tensors, shape, layer)
            values = _part(values, part, kept)
            if part in _NORMS and spec.norm == "rms":
                values = values * np.float32(energy.norm_factor(layer, columns))
        result[name] = StoredTensor.from_floats(name, np.ascontiguousarray(values, np.float32))
    return result


def _part(values: Floats, part: str, kept: Mapping[str, Indices]) -> Floats:
    if values.ndim == 2 and values.shape[0] > 1:
        columns = kept.get(_COLUMNS.get(part, "dim"))
        values = values if columns is None else values[:, columns]
        rows = kept.get(_ROWS[part])
        return values if rows is None else values[rows]
    entries = kept.get(_ROWS[part])
    flat = values.reshape(-1)
    return flat if entries is None else flat[entries]


def _kept_heads(
    tensors: Mapping[str, StoredTensor], spec: ModelSpec, shape: Shape, layer: int
) -> dict[str, Indices]:
    """The rows of the kept heads: groups of queries, and their keys and values."""
    output = tensors[f"layers.{layer}.o"].dequantise()  # [dim, heads * head_dim]
    value = tensors[f"layers.{layer}.v"].dequantise()  # [kv heads * head_dim, dim]
    groups = spec.num_kv_heads
    weight = _norms(output.T, groups) * _norms(value, groups)
    kept = np.sort(np.argsort(-weight, kind="stable")[: shape.num_kv_heads])
    return {
        "heads": _rows_of(kept, output.shape[1] // groups),
        "kv": _rows_of(kept, len(value) // groups),
    }


def _kept_neurons(tensors: Mapping[str, StoredTensor], shape: Shape, layer: int) -> Indices:
    down = tensors[f"layers.{layer}.down"].dequantise()  # [dim, ffn]
    weight = np.linalg.norm(down, axis=0)
    for part in ("gate", "up"):
        if tensor := tensors.get(f"layers.{layer}.{part}"):
            weight = weight * np.linalg.norm(tensor.dequantise(), axis=1)
    return np.sort(np.argsort(-weight, kind="stable")[: shape.ffn_dim])


def _norms(rows: Floats, groups: int) -> Floats:
    """The norm of each group of adjacent rows."""
    norms: Floats = np.linalg.norm(rows.reshape(groups, -1), axis=1)
    return norms


def _rows_of(groups: Indices, size: int) -> Indices:
    return (groups[:, None] * size + np.arange(size)).reshape(-1)
