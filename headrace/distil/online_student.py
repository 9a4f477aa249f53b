"""A drafter in training on windows of served outputs, in slices of work.

The labels are the verified tokens themselves. The target's distribution would say more about each
token, but it needs the target's last row of every token, which a drafter's taps need not have, and
a product with the target's whole head. Sampled tokens have the same loss in the mean.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic, process_time
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from headrace.checkpoint.drafter import Drafter
from headrace.distil.draft import DEPTH, product_type
from headrace.distil.draft_layer import DraftLayer
from headrace.distil.draft_start import half_split
from headrace.speculation.learning.buffer import PAIRS, Window

_STEP_DECAY = 0.8
"""Weight of a step's loss relative to the step before it, as in the authors' code."""
_BETAS = 0.9, 0.95
_MAX_NORM = 1.0
SLICE_SECONDS = 0.045
"""Aim of the length of a slice, below 50 ms."""
_MIN_PAIRS = 64
"""Fewer pairs save little time, because most of a small slice is the gradients of all weights."""
_LENGTHS, _ROWS = 32, 64
"""Lengths of windows, and numbers of rows of the head, are rounded up to multiples of these."""
_OVERLAP = 16
"""Pairs before those to train on, in a part of a window."""
_MAX_PAIRS = 1024

Weights = Mapping[str, Tensor]
NAMES = {
    "fuse": "fc",
    "own_fuse": "fc_own",
    "taps_norm": "taps_norm",
    "norm": "norm",
    "head": "lm_head",
    "layers.0.attn_norm": "midlayer.input_layernorm",
    "layers.0.hidden_norm": "midlayer.hidden_norm",
    "layers.0.mlp_norm": "midlayer.post_attention_layernorm",
    **{f"layers.0.{part}": f"midlayer.self_attn.{part}_proj" for part in "qkvo"},
    **{f"layers.0.{part}": f"midlayer.mlp.{part}_proj" for part in ("gate", "up", "down")},
}
"""The names of files by ours; a drafter may lack some."""


class Score(NamedTuple):
    """Held-out drafts of a window."""

    accepted: int
    """Accepted drafts of all chains of `DEPTH` drafts."""
    chains: int


def weights_of(drafter: Drafter) -> dict[str, Tensor]:
    """The weights of a drafter by the names of `DraftLayer`."""
    weights = {}
    for ours, name in NAMES.items():
        if ours not in drafter.tensors:
            continue
        values = torch.from_numpy(np.array(drafter.tensors[ours].dequantise(), np.float32))
        if ours in ("layers.0.q", "layers.0.k"):
            values = half_split(values, drafter.spec)
        weights[f"{name}.weight"] = values.flatten() if "norm" in name else values
    return weights


class OnlineStudent:
    """Trains by windows. Each call of `learn` and `score` is a slice of work, or less."""

    def __init__(
        self, drafter: Drafter, learning_rate: float, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype` is the type of products; None: `product_type`."""
        spec = drafter.spec
        assert spec.drafter
        self.spec = spec
        self.dtype = dtype or product_type()
        self._learning_rate = learning_rate
        tokens = drafter.tokens
        self.tokens = np.arange(spec.vocab_size) if tokens is None else tokens.astype(np.int64)
        self._draft_token = np.full(spec.vocab_size, -1)
        self._draft_token[self.tokens] = np.arange(len(self.tokens))
        embedding = np.array(drafter.tensors["embed"].dequantise(), np.float32)
        self._embedding = torch.from_numpy(embedding).to(self.dtype)
        self.module = DraftLayer(spec)
        self._copy = _with_matrices(DraftLayer(spec), self.dtype)
        """The layer that computes. A slice would convert each matrix up to four times."""
        self._judge = _with_matrices(DraftLayer(spec), self.dtype)
        self._judged: Weights | None = None
        self._pairs = _MIN_PAIRS
        self.use(weights_of(drafter))

    def use(self, weights: Weights) -> None:
        """Go on with these weights, and a new optimiser."""
        self.module.load_state_dict(dict(weights))
        self._optimiser = torch.optim.AdamW(
            self.module.parameters(),
            lr=self._learning_rate,
            betas=_BETAS,
            weight_decay=0.0,
            fused=True,
        )
        self._copy.load_state_dict(dict(weights))
        self._gradients = 0.0

    def weights(self) -> dict[str, Tensor]:
        """Copy the present weights."""
        return {name: value.detach().clone() for name, value in self.module.named_parameters()}

    def learn(self, windows: Sequence[Window]) -> Iterator[int]:
        """Add the gradients of windows, and yield the number of tokens after each slice."""
        pieces = [piece for window in windows for piece in self._pieces(window)]
        while pieces:
            count = max(1, self._pairs // max(len(piece.tokens) for piece in pieces[:1]))
            part, pieces = pieces[:count], pieces[count:]
            begun, cpu_begun = monotonic(), process_time()
            num_tokens = self._add_gradients(part)
            # Other work on the machine makes a slice longer, and not the CPU time of this process.
            seconds = min(monotonic() - begun, process_time() - cpu_begun)
            self._measure(sum(len(piece.tokens) for piece in part), seconds)
            yield num_tokens

    def update(self) -> None:
        """Take a step with the gradients so far, if they are finite."""
        if not self._gradients:
            return
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= self._gradients
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), _MAX_NORM)
        if math.isfinite(norm.item()):
            self._optimiser.step()
            self._copy.load_state_dict(self.module.state_dict())
        self._optimiser.zero_grad()
        self._gradients = 0.0

    @torch.no_grad()
    def score(self, weights: Weights, window: Window) -> Score:
        """Count the greedy drafts of other weights that are the tokens of a window."""
        if self._judged is not weights:
            self._judge.load_state_dict(dict(weights))
            self._judged = weights
        inputs = self._inputs([window])
        alive = inputs.depths >= 0
        chains, accepted = int(alive.sum()), 0
        matrix = self._judge.lm_head.weight
        for step, rows in enumerate(self._rows(self._judge, inputs)):
            right = (rows.to(self.dtype) @ matrix.T).argmax(-1) == inputs.labels
            right &= inputs.depths >= step
            # A chain that starts at a pair has the draft of this step so many pairs later.
            alive = alive & torch.cat([right[step:], right.new_zeros(step)])
            accepted += int(alive.sum())
        return Score(accepted, chains)

    def _pieces(self, window: Window) -> Iterator[Window]:
        """Cut a window that would take longer than a slice."""
        count = len(window.tokens)
        if count <= self._pairs:
            yield window
            return
        for start in range(0, count - 1, self._pairs - _OVERLAP):
            part = slice(start, start + self._pairs)
            piece = window._replace(
                position=window.position + start,
                first=max(window.first - start, _OVERLAP - 1 if start else 0),
                tokens=window.tokens[part],
                taps=window.taps[part],
            )
            if piece.num_trained > 0:
                yield piece

    def _measure(self, pairs: int, seconds: float) -> None:
        fitting = pairs * SLICE_SECONDS / max(seconds, 1e-4)
        aim = min(fitting, 2 * self._pairs)
        self._pairs = int(min(max(aim, _MIN_PAIRS), _MAX_PAIRS))

    def _add_gradients(self, windows: Sequence[Window]) -> int:
        inputs = self._inputs(windows)
        rows, labels, weights = list[Tensor](), list[Tensor](), list[Tensor]()
        for step, x in enumerate(self._rows(self._copy, inputs)):
            chosen = ((inputs.labels >= 0) & (inputs.depths >= step)).nonzero().squeeze(1)
            rows.append(x[chosen])
            labels.append(inputs.labels[chosen])
            weights.append(torch.full((len(chosen),), _STEP_DECAY**step))
        num_tokens, weight = int((inputs.depths >= 0).sum()), torch.cat(weights)
        if not len(weight):
            return num_tokens
        # A product of a new shape is compiled, and kept in memory: so there are few shapes.
        unused = -len(weight) % _ROWS
        weight = functional.pad(weight, (0, unused))
        chosen_rows = functional.pad(torch.cat(rows), (0, 0, 0, unused)).to(self.dtype)
        logits = self._copy.lm_head(chosen_rows)
        wanted = functional.pad(torch.cat(labels), (0, unused))
        losses = functional.cross_entropy(logits, wanted, reduction="none")
        (losses.float() @ weight).backward()
        for own, computed in zip(self.module.parameters(), self._copy.parameters(), strict=True):
            if computed.grad is not None:
                sums = torch.zeros_like(own) if own.grad is None else own.grad
                own.grad = sums.add_(computed.grad)
                computed.grad = None
        self._gradients += float(weight.sum())
        return num_tokens

    def _rows(self, module: DraftLayer, inputs: "_Inputs") -> Iterator[Tensor]:
        """Yield the normed rows [windows * pairs, dim] of each step."""
        for rows in module.rows(
            inputs.embeddings, inputs.taps, inputs.positions, inputs.groups, DEPTH
        ):
            yield module.norm(rows).flatten(0, 1)

    def _inputs(self, windows: Sequence[Window]) -> "_Inputs":
        longest = max(len(window.tokens) for window in windows)
        length = longest + -longest % _LENGTHS
        shape = len(windows), length
        tokens, positions, groups = (np.zeros(shape, np.int64) for _ in range(3))
        labels, depths = np.full(shape, -1), np.full(shape, -1)
        taps = torch.zeros(*shape, windows[0].taps.shape[1], dtype=self.dtype)
        for i, window in enumerate(windows):
            count = len(window.tokens)
            tokens[i, :count] = window.tokens
            positions[i, :count] = np.arange(window.position, window.position + count)
            groups[i, :count] = 1
            taps[i, :count] = _numbers(window.taps).to(self.dtype)
            labels[i, window.first : count - 1] = self._draft_token[
                window.tokens[window.first + 1 :]
            ]
            depths[i, window.first : count - 1] = np.arange(window.num_trained)
        return _Inputs(
            embeddings=self._embedding[torch.from_numpy(tokens)],
            taps=taps,
            positions=torch.from_numpy(positions),
            groups=torch.from_numpy(groups),
            labels=torch.from_numpy(labels).flatten(),
            depths=torch.from_numpy(depths).flatten(),
        )


def _with_matrices(layer: DraftLayer, dtype: torch.dtype) -> DraftLayer:
    """Convert the matrices of a layer. Norms stay in f32."""
    for parameter in layer.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.to(dtype)
    return layer


class _Inputs(NamedTuple):
    embeddings: Tensor  # [windows, pairs, dim] of the token after each position
    taps: Tensor  # [windows, pairs, width]
    positions: Tensor  # [windows, pairs]
    groups: Tensor  # [windows, pairs]
    labels: Tensor
    """[windows * pairs] the drafter's token to draft; -1: it has none."""
    depths: Tensor
    """[windows * pairs] number of drafts in a row that may lead to each pair; -1: none."""


def _numbers(bits: NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy((bits.astype(np.uint32) << 16).view(np.float32))


assert PAIRS <= _MAX_PAIRS
