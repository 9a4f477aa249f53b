"""The first weights of a drafter: parts of its target, and the best linear maps to its rows.

The layer starts from the target's last layer, the head and the norm from the target's. If a matrix
joins embedding and rows, ridge regression gives the map from them to the target's next row, in
closed form; attention and MLP then start from zero. That map drafts better than minutes of
gradient steps.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from headrace.checkpoint.load import Checkpoint
from headrace.distil.draft_layer import DraftLayer
from headrace.model.spec import ModelSpec

_RIDGE = 0.003
"""Added to the mean square of each input, which is about 1."""
_MIN_NORM = 1e-3


@torch.no_grad()
def copy_target(
    module: DraftLayer, spec: ModelSpec, target: Checkpoint, head: Tensor, seed: int
) -> None:
    """Copy parts of the target, and draw other matrices by seed.

    `head` [drafter's tokens, dim] are rows of the target's head.
    """
    drafter = spec.drafter
    assert drafter
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            deviation = 0.5 * parameter.shape[1] ** -0.5
            parameter.normal_(0, deviation, generator=generator)
    module.lm_head.weight.copy_(head)
    if target.spec.norm == "rms":
        weight = stored_matrix(target, "norm").flatten()
        module.norm.weight.copy_(torch.where(weight.abs() < _MIN_NORM, _MIN_NORM, weight))
    _copy_last_layer(module, spec, target)
    if drafter.embedding_in_residual:
        module.midlayer.self_attn.o_proj.weight.zero_()
        module.midlayer.mlp.down_proj.weight.zero_()
    else:
        # The mixed row starts as the last tap.
        module.fc.weight.zero_()
        module.fc.weight[:, -drafter.target_dim :] = torch.eye(spec.dim)


def _copy_last_layer(module: DraftLayer, spec: ModelSpec, target: Checkpoint) -> None:
    """Start from the target's last layer, as far as its matrices have the drafter's shapes.

    If the layer reads pairs of an embedding and a row, the target's matrices go to the rows.
    """
    layer = f"layers.{target.spec.num_layers - 1}"
    attention, mlp = module.midlayer.self_attn, module.midlayer.mlp
    norms = module.midlayer.hidden_norm, module.midlayer.post_attention_layernorm
    places: dict[str, nn.Module] = {
        "q": attention.q_proj,
        "k": attention.k_proj,
        "v": attention.v_proj,
        "o": attention.o_proj,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
        "down": mlp.down_proj,
    }
    if target.spec.norm == "rms":
        places |= {"attn_norm": norms[0], "mlp_norm": norms[1]}
    for name, place in places.items():
        if f"{layer}.{name}" not in target.tensors:
            continue
        values, weight = stored_matrix(target, f"{layer}.{name}"), place.weight
        if name in ("q", "k"):
            values = half_split(values, spec)
        if weight.dim() == 1:
            values = values.flatten()
        if values.shape[0] == weight.shape[0] and values.shape[-1] <= weight.shape[-1]:
            weight[..., weight.shape[-1] - values.shape[-1] :] = values


def half_split(matrix: Tensor, spec: ModelSpec) -> Tensor:
    """The rows of queries or keys as files have them: first halves of rotary pairs first."""
    heads = matrix.reshape(-1, spec.head_dim, matrix.shape[1])
    return torch.cat([heads[:, ::2], heads[:, 1::2]], 1).reshape(matrix.shape)


def ridge(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the matrix [dim, width] of the best linear map, from inputs [N, width] to [N, dim].

    The sums are in f64, over the pairs in their order.
    """
    inputs_squared = wanted_products = torch.zeros((), dtype=torch.float64)
    count = 0
    for inputs, wanted in pairs:
        inputs_squared = inputs_squared + (inputs.T @ inputs).double()
        wanted_products = wanted_products + (inputs.T @ wanted).double()
        count += len(inputs)
    inputs_squared.diagonal().add_(_RIDGE * max(count, 1))
    return torch.linalg.solve(inputs_squared, wanted_products).T.float()


def stored_matrix(target: Checkpoint, name: str) -> Tensor:
    """A tensor of the target in f32."""
    return torch.from_numpy(np.array(target.tensors[name].dequantise(), np.float32))
