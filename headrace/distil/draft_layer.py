"""The layer of an EAGLE-3 drafter in torch, with the test-time steps of its training.

It computes what `headrace/model/eagle3.py` traces, under the names of the authors' files. In step
j of the training a pair reads the row that step j - 1 gave the pair before it, as a draft does
(Li et al. 2025). So it attends to pairs of step 0 up to j positions before it, and to one pair of
each of the steps 1 to j.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model.rope import inverse_frequencies
from headrace.model.spec import ModelSpec

Keys = list[tuple[Tensor, Tensor]]
"""Keys and values [sequences, KV heads, positions, head width] of each step."""


class DraftLayer(nn.Module):
    """The weights of a drafter. `spec` has a `drafter`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        drafter = spec.drafter
        assert drafter and spec.rope
        width = len(drafter.taps) * drafter.target_dim
        self._is_joined = drafter.embedding_in_residual
        if self._is_joined:
            self.fc = _Linear(spec.dim + width, spec.dim)
            self.fc_own = _Linear(2 * spec.dim, spec.dim)
            self.taps_norm = _Norm(width, spec.norm_eps, len(drafter.taps))
        else:
            self.fc = _Linear(width, spec.dim)
        self.midlayer = _Layer(spec)
        self.norm = _Norm(spec.dim, spec.norm_eps)
        self.lm_head = _Linear(spec.dim, drafter.vocab_size)
        frequencies, self._factor = inverse_frequencies(
            spec.rope, spec.max_context, spec.max_context
        )
        self._frequencies = torch.from_numpy(frequencies)
        self._norm_before_residual = drafter.norm_before_residual

    def rows(
        self, embeddings: Tensor, taps: Tensor, positions: Tensor, groups: Tensor, num_steps: int
    ) -> list[Tensor]:
        """Return the rows [sequences, positions, dim] of each step, before the last norm, in f32.

        Products have the type of the embeddings and taps.

        Args:
            embeddings: [sequences, positions, dim] of the token after each position.
            taps: [sequences, positions, width] rows of the target.
            positions: [sequences, positions] in the text of each group.
            groups: [sequences, positions] number of the text; texts do not see each other.
            num_steps: the number of drafts, from 1.
        """
        length = groups.shape[1]
        turns = self._turns(positions)
        same = groups[:, :, None] == groups[:, None, :]
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        tokens = self.midlayer.input_layernorm(embeddings)
        inputs, residual = self._of_target(tokens, taps)
        keys, results = Keys(), list[Tensor]()
        for step in range(num_steps):
            if step:
                inputs, residual = self._of_itself(tokens, shifted(results[-1], 1, 1))
            hidden = ~(same & (distance >= step))[:, None, None]
            bias = torch.zeros_like(hidden, dtype=inputs.dtype).masked_fill_(hidden, -torch.inf)
            results.append(self.midlayer(inputs, residual, turns, bias, keys))
        return results

    def pairs(self, embeddings: Tensor, rows: Tensor, *, own: bool) -> Tensor:
        """Return the inputs [..., width] of the matrix of joined rows, `own` or a target's."""
        tokens = self.midlayer.input_layernorm(embeddings)
        normed = self.norm(rows) if own else self.taps_norm(rows)
        return torch.cat([tokens, normed.to(tokens.dtype)], -1)

    def _of_target(self, tokens: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of attention, and the residual stream in f32, of the first step."""
        if not self._is_joined:
            return self._separate(tokens, self.fc(taps).float())
        return self._joined(self.fc(torch.cat([tokens, self.taps_norm(taps)], -1)).float(), tokens)

    def _of_itself(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same of a further step, from rows of the step before it."""
        if not self._is_joined:
            return self._separate(tokens, rows)
        pair = torch.cat([tokens, self.norm(rows).to(tokens.dtype)], -1)
        return self._joined(self.fc_own(pair).float(), tokens)

    def _joined(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.hidden_norm(x).to(tokens.dtype), x

    def _separate(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.midlayer.hidden_norm(rows)
        inputs = torch.cat([tokens, normed.to(tokens.dtype)], -1)
        return inputs, normed if self._norm_before_residual else rows

    def logits(self, rows: Tensor) -> Tensor:
        """The logits [..., drafter's tokens] of rows, for the token after the next one."""
        result: Tensor = self.lm_head(self.norm(rows))
        return result

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [sequences, 1, positions, head width / 2]."""
        angles = (positions[:, None, :, None] * self._frequencies).float()
        return angles.cos() * self._factor, angles.sin() * self._factor


class _Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.drafter
        width = spec.dim * (1 if spec.drafter.embedding_in_residual else 2)
        self.input_layernorm = _Norm(spec.dim, spec.norm_eps)
        self.hidden_norm = _Norm(spec.dim, spec.norm_eps)
        self.self_attn = _Attention(spec, width)
        self.post_attention_layernorm = _Norm(spec.dim, spec.norm_eps)
        self.mlp = _Mlp(spec)

    def forward(
        self,
        inputs: Tensor,
        residual: Tensor,
        turns: tuple[Tensor, Tensor],
        bias: Tensor,
        keys: Keys,
    ) -> Tensor:
        """Append the keys of a step to `keys`, and return its rows."""
        x = residual + self.self_attn(inputs, turns, bias, keys)
        normed = self.post_attention_layernorm(x).to(inputs.dtype)
        result: Tensor = x + self.mlp(normed)
        return result


class _Attention(nn.Module):
    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._width = (
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
        )
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = _Linear(width, q_width)
        self.k_proj = _Linear(width, kv_width)
        self.v_proj = _Linear(width, kv_width)
        self.o_proj = _Linear(q_width, spec.dim)

    def forward(
        self, pair: Tensor, turns: tuple[Tensor, Tensor], bias: Tensor, keys: Keys
    ) -> Tensor:
        batch, length, _ = pair.shape
        q = self._split(self.q_proj(pair), self._heads) * self._width**-0.5
        q = turned(q, turns)
        k = turned(self._split(self.k_proj(pair), self._kv_heads), turns)
        keys.append((k, self._split(self.v_proj(pair), self._kv_heads)))
        first_keys, first_values = keys[0]
        step, group = len(keys) - 1, self._heads // self._kv_heads
        q = q.reshape(batch, self._kv_heads, group * length, self._width)
        scores = (q @ first_keys.transpose(2, 3)).reshape(
            batch, self._kv_heads, group, length, length
        )
        scores += bias
        q = q.reshape(batch, self._kv_heads, group, length, self._width)
        later = [
            (shifted(k, 2, step - i), shifted(v, 2, step - i))
            for i, (k, v) in enumerate(keys[1:], 1)
        ]
        if later:
            own = [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in later]
            scores = torch.cat([scores, *own], -1)

        weights = scores.softmax(-1)
        first = weights[..., :length].reshape(batch, self._kv_heads, group * length, length)
        mixed = (first @ first_values).reshape(q.shape)
        for i, (_, v) in enumerate(later, length):
            mixed = mixed + weights[..., i : i + 1] * v[:, :, None]
        mixed = mixed.reshape(batch, self._heads, length, self._width)
        result: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.reshape(*x.shape[:2], heads, self._width).transpose(1, 2)


class _Linear(nn.Module):
    """A matrix in f32, whose products have the type of their input."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out_width, in_width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class _Norm(nn.Module):
    """RMSNorm in the type of its input, over `parts` equal parts of a row.

    `nn.RMSNorm` is slow if its weight has another type.
    """

    def __init__(self, width: int, eps: float, parts: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps, self._parts = eps, parts

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self._parts == 1:
            return functional.rms_norm(x, x.shape[-1:], weight, self._eps)
        parts = x.unflatten(-1, (self._parts, -1))
        return functional.rms_norm(parts, parts.shape[-1:], None, self._eps).flatten(-2) * weight


class _Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = _Linear(spec.dim, spec.ffn_dim)
        self.up_proj = _Linear(spec.dim, spec.ffn_dim)
        self.down_proj = _Linear(spec.ffn_dim, spec.dim)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


def shifted(x: Tensor, dim: int, count: int) -> Tensor:
    """Move the entries of an axis `count` places on, with zeros before them."""
    if not count:
        return x
    kept = x.narrow(dim, 0, max(0, x.shape[dim] - count))
    zeros = x.new_zeros([*x.shape[:dim], x.shape[dim] - kept.shape[dim], *x.shape[dim + 1 :]])
    return torch.cat([zeros, kept], dim)


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of entries, the first half with the second; entries after them stay."""
    cosine, sine = turns
    width = cosine.shape[-1]
    first, second, others = x[..., :width], x[..., width : 2 * width], x[..., 2 * width :]
    parts = [first * cosine - second * sine, second * cosine + first * sine, others]
    return torch.cat(parts, -1).to(x.dtype)
