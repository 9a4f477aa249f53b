"""Cuts the FFNs of a dense model into experts, in the shape of Qwen2-MoE.

Groups of neurons are CMoE's (Pei et al. 2025). Three parts have a closed form:

* The router is a ridge regression, from the FFN's input to each expert's share of the output.

* `down` is fitted again, by a ridge regression towards its old values, to the output that all
  neurons would give. If all experts are active, nothing is lost, and `down` keeps its values.

* The experts of a dense FFN have the weight 1, and Qwen2-MoE multiplies each with a soft-max over
  all experts, and the shared expert with a sigmoid. So the router's logits are below 2^-10, which
  keeps their order and makes all weights of n experts 1/n, and `down` holds n times the values.
  The gate of the shared expert is zero, which halves its output, and its `down` holds twice the
  values.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from headrace.convert.activation_stats import input_rows
from headrace.convert.matrices import ProgressCallback
from headrace.convert.neuron_groups import Neurons, group_neurons
from headrace.convert.source_model import SourceModel
from headrace.errors import RequestError
from headrace.model.spec import ExpertSpec, ModelSpec
from headrace.quant.arrays import Floats
from headrace.quant.formats import FORMATS, StoredTensor
from headrace.quant.spec import encode_numbers
from headrace.record import frozen
from headrace.validation import integer

_HELD_OUT = 8
"""One in this many tokens, at the end, measures the error and is not fitted."""
_MAX_LOGIT = 2.0**-10
"""Softmax weights then differ by at most 0.1 %; float32 still orders logits of this size."""
_ROUTER_RIDGE, _DOWN_RIDGE = 1e-3, 0.3
"""In multiples of the mean square of a column."""
_PARTS = ("gate", "up", "down")


@frozen(kw_only=True)
class Moefication:
    """The experts of each FFN."""

    experts: int
    """Groups of equal size, with the shared ones."""
    active: int
    """Groups that a token uses, with the shared ones."""
    shared: int = 0
    """Groups that every token uses; 0: three quarters of the active ones."""
    layers: tuple[int, ...] = ()
    """Layers with experts; empty: all."""

    @property
    def num_shared(self) -> int:
        return self.shared or max(1, self.active * 3 // 4)


@frozen(eq=False)
class MoefiedLayer:
    tensors: Mapping[str, StoredTensor]
    """The tensors of the shape Qwen2-MoE, by our names."""
    error: float
    """Relative error of the FFN's output on tokens that were not fitted."""


def moefied_spec(spec: ModelSpec, options: Moefication) -> ModelSpec:
    """The specification of the result. Raises RequestError."""
    integer("--moefy", options.experts, 2, max(spec.ffn_dim, 2))
    integer("--active", options.active, 2, options.experts)
    integer("--shared", options.num_shared, 1, options.active - 1)
    if spec.experts:
        raise RequestError(
            f"--moefy cuts dense FFNs, and this model has {spec.experts.num_experts} experts "
            "already; choose a dense model"
        )
    if not spec.gated_mlp or spec.activation != "silu" or spec.mlp_bias:
        raise RequestError(
            "--moefy writes the shape of Qwen2-MoE, whose FFN has a SiLU gate and no biases; this "
            f"{spec.architecture} model has another FFN; choose a model with a SwiGLU FFN"
        )
    if spec.ffn_dim % options.experts:
        divisors = [n for n in range(2, 129) if spec.ffn_dim % n == 0]
        raise RequestError(
            f"--moefy {options.experts} does not divide the {spec.ffn_dim:,} neurons of an FFN; "
            f"choose one of {', '.join(map(str, divisors))}"
        )
    if outside := [layer for layer in options.layers if not 0 <= layer < spec.num_layers]:
        raise RequestError(
            f"--moefy-layers names layer {outside[0]}, and the model has {spec.num_layers} layers; "
            f"choose from 0 to {spec.num_layers - 1}"
        )
    width = spec.ffn_dim // options.experts
    dense = set(range(spec.num_layers)) - set(options.layers) if options.layers else ()
    experts = ExpertSpec(
        num_experts=options.experts - options.num_shared,
        top_k=options.active - options.num_shared,
        ffn_dim=width,
        normalised=False,
        shared_ffn_dim=options.num_shared * width,
        shared_gate=True,
        dense_layers=tuple(sorted(dense)),
    )
    return replace(spec, architecture="qwen2_moe", experts=experts)


def moefied_layers(
    source: SourceModel,
    options: Moefication,
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
) -> dict[int, MoefiedLayer]:
    """Cut the FFNs by their activations on the pieces of a calibration text.

    Nothing is fitted to the last piece. Fitted matrices become bf16, or float32 if the model's
    are. Raises RequestError.
    """
    spec, tensors = source.spec, source.checkpoint.tensors
    moefied_spec(spec, options)
    if len(pieces) < 2:
        raise RequestError(
            "--moefy measures its loss on the last piece of the calibration text, and the text has "
            "one piece; use more --calibration-tokens, or a smaller --length"
        )
    held_out = max(len(pieces[-1]), sum(map(len, pieces)) // _HELD_OUT)
    layers = options.layers or tuple(range(spec.num_layers))
    result = {}
    reading = _ffn_rows(spec, tensors, layers, pieces, threads, on_progress)
    for layer, x, hidden in reading:
        ffn = _Ffn(layer, tensors, x, hidden, options, held_out)
        result[layer] = MoefiedLayer(ffn.tensors(), ffn.error)
    return result


def with_experts(
    source: SourceModel, options: Moefication, layers: Mapping[int, MoefiedLayer]
) -> SourceModel:
    """The model with experts in these layers, and its own FFN in the others."""
    checkpoint = source.checkpoint
    spec = moefied_spec(checkpoint.spec, replace(options, layers=tuple(sorted(layers))))
    tensors = dict(checkpoint.tensors)
    for layer, made in layers.items():
        for part in _PARTS:
            del tensors[f"layers.{layer}.{part}"]
        tensors.update(made.tensors)
    made_checkpoint = replace(checkpoint, spec=spec, tensors=tensors, stored={})
    return replace(source, checkpoint=made_checkpoint, tensors={}, is_rebuilt=True)


def _ffn_rows(
    spec: ModelSpec,
    tensors: Mapping[str, StoredTensor],
    layers: tuple[int, ...],
    pieces: list[list[int]],
    threads: int,
    on_progress: ProgressCallback,
) -> Iterator[tuple[int, Floats, Floats]]:
    """Yield layers with the inputs [tokens, dim] and the hidden rows [tokens, neurons] of FFNs."""
    names = [f"layers.{layer}.{part}" for layer in layers for part in ("gate", "down")]
    waiting: defaultdict[int, dict[str, Floats]] = defaultdict(dict)
    for rows, readers in input_rows(spec, tensors, names, pieces, threads, on_progress):
        _, layer, part = readers[0].split(".")
        found = waiting[int(layer)]
        found[part] = rows
        if len(found) == 2:
            del waiting[int(layer)]
            yield int(layer), found["gate"], found["down"]


class _Ffn:
    """One FFN, with its rows for the calibration text."""

    def __init__(
        self,
        layer: int,
        tensors: Mapping[str, StoredTensor],
        x: Floats,
        hidden: Floats,
        options: Moefication,
        held_out: int,
    ) -> None:
        self._name = f"layers.{layer}"
        self._old = {part: tensors[f"{self._name}.{part}"] for part in _PARTS}
        self._active = options.active - options.num_shared
        fitted = len(x) - held_out
        columns = self._old["down"].dequantise().T  # [neurons, dim]
        self._groups = group_neurons(
            hidden[:fitted],
            np.linalg.norm(columns, axis=1),
            options.experts,
            options.num_shared,
        )
        norms = [np.linalg.norm(hidden[:, g] @ columns[g], axis=1) for g in self._groups.routed]
        self._router = fit_router(x[:fitted], np.stack(norms, axis=1)[:fitted])

        used = hidden * self._mask(x, hidden.shape[1])
        lost = (hidden - used) @ columns
        self._columns = columns + fit_down(used[:fitted], lost[:fitted])
        wanted, result = hidden[fitted:] @ columns, used[fitted:] @ self._columns
        size = max(float(np.linalg.norm(wanted)), 1e-30)
        self.error = float(np.linalg.norm(result - wanted)) / size

    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors of the shape Qwen2-MoE, by our names."""
        name, groups = self._name, self._groups
        count, dim = self._router.shape
        result = self._expert(f"{name}.shared_", groups.shared, 2.0)
        for i, neurons in enumerate(groups.routed):
            result |= self._expert(f"{name}.experts.{i}.", neurons, float(count))
        zero = np.zeros((1, dim), np.float32)
        return result | {
            f"{name}.router": StoredTensor.from_floats(f"{name}.router", self._router),
            f"{name}.shared_router": StoredTensor.from_floats(f"{name}.shared_router", zero),
        }

    def _expert(self, prefix: str, neurons: Neurons, factor: float) -> dict[str, StoredTensor]:
        columns = self._columns[neurons].T * np.float32(factor)
        down = _like(self._old["down"], f"{prefix}down", columns)
        rows = {
            f"{prefix}{part}": _rows(self._old[part], f"{prefix}{part}", neurons)
            for part in ("gate", "up")
        }
        return {**rows, f"{prefix}down": down}

    def _mask(self, x: Floats, num_neurons: int) -> Floats:
        """Ones [tokens, neurons] for neurons of the shared and the chosen experts."""
        scores = x @ self._router.T
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self._active]
        mask = np.zeros((len(x), num_neurons), np.float32)
        mask[:, self._groups.shared] = 1
        for i, neurons in enumerate(self._groups.routed):
            mask[:, neurons] = (order == i).any(axis=1, keepdims=True)
        return mask


def fit_router(x: Floats, norms: Floats) -> Floats:
    """Fit a router [experts, dim] to the norms [tokens, experts] of the experts' outputs.

    Logits of the rows of `x` [tokens, dim] predict the share of each norm, up to a sum that is
    equal for all experts.
    """
    share = norms / np.maximum(norms.sum(axis=1, keepdims=True), 1e-30)
    router = _ridge(x, share, _ROUTER_RIDGE).T
    router -= router.mean(axis=0)
    largest = float(np.abs(x @ router.T).max())
    return np.ascontiguousarray(router * np.float32(_MAX_LOGIT / max(largest, 1e-30)))


def fit_down(used: Floats, lost: Floats) -> Floats:
    """Fit the change [neurons, dim] of `down` that adds `lost` [tokens, dim].

    `used` [tokens, neurons] are the hidden rows, with zeros for neurons that a token leaves out.
    """
    if not lost.any():
        return np.zeros((used.shape[1], lost.shape[1]), np.float32)
    return _ridge(used, lost, _DOWN_RIDGE)


def _ridge(x: Floats, y: Floats, strength: float) -> Floats:
    """The ridge regression [cols of x, cols of y], by the smaller of the two products of `x`."""
    penalty = max(strength * float(np.square(x).sum()) / x.shape[1], 1e-30)
    is_wide = x.shape[0] < x.shape[1]
    products = x @ x.T if is_wide else x.T @ x
    products[np.diag_indices_from(products)] += np.float32(penalty)
    solution: Floats = np.linalg.solve(products, y if is_wide else x.T @ y)
    return x.T @ solution if is_wide else solution


def _rows(tensor: StoredTensor, name: str, rows: Neurons) -> StoredTensor:
    stored = rows if tensor.row_order is None else tensor.row_order[rows]
    return tensor.take(name, stored)


def _like(old: StoredTensor, name: str, values: Floats) -> StoredTensor:
    """A matrix in bf16, or in float32 if the old one is."""
    if old.format.name == "F32":
        return StoredTensor.from_floats(name, values)
    words = encode_numbers(np.ascontiguousarray(values), "bf16").reshape(-1)
    return StoredTensor.from_bytes(name, FORMATS["BF16"], values.shape, words.view(np.uint8))
