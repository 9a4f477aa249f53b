"""The loss of a student at the head: the text of the teacher, and the teacher's distribution."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.model.spec import ModelSpec
from headrace.record import frozen

_CHUNK_LOGITS = 1 << 25
"""Logits that are in memory at once."""


@frozen(kw_only=True)
class HeadLoss:
    """Weights of the two parts of the loss."""

    outputs: float
    """Weight of the cross-entropy with the teacher's text."""
    logits: float
    """Weight of the divergence from the teacher's distribution."""
    temperature: float = 1.0
    """Both distributions are compared at this temperature; the loss is scaled by its square, so
    that gradients keep their size (Hinton et al. 2015).
    """
    top_k: int = 0
    """Number of the teacher's likeliest tokens that count; 0: all."""


@frozen(eq=False)
class Head:
    """The matrix and the constants that turn rows into logits."""

    weight: Tensor  # [vocab, dim]
    bias: Tensor | None  # [vocab]
    scale: float
    cap: float

    @classmethod
    def of(cls, spec: ModelSpec, weight: Tensor, bias: Tensor | None) -> "Head":
        return cls(weight, bias, spec.logit_scale, spec.logit_softcap)

    def logits(self, rows: Tensor) -> Tensor:
        """Compute logits in float32 [rows, vocab]; the product has the type of the matrix."""
        logits = (rows.to(self.weight.dtype) @ self.weight.T).float()
        if self.bias is not None:
            logits += self.bias
        logits *= self.scale
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of the logits by the products."""
        return self.scale * (1 - (logits / self.cap) ** 2) if self.cap else self.scale


def chunks(num_rows: int, vocab_size: int) -> list[slice]:
    """Split rows so that their logits fit in memory."""
    size = max(32, _CHUNK_LOGITS // vocab_size)
    return [slice(i, min(i + size, num_rows)) for i in range(0, num_rows, size)]


def head_loss(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    head: Callable[[Tensor, Tensor | None], Head],
    teacher: Head,
    final: Tensor,
    targets: Tensor,
    parts: HeadLoss,
) -> Tensor:
    """Compute the mean loss of rows [rows, dim], with gradients to the rows, weight and bias.

    `head` makes the student's head of its weight and bias. `final` are rows of the teacher, and
    `targets` the tokens after the rows. The logits of all rows are never in memory at once.
    """
    loss: Tensor = _HeadLoss.apply(rows, weight, bias, head, teacher, final, targets, parts)
    return loss


class _HeadLoss(torch.autograd.Function):
    """Computes the gradients of each chunk of rows together with its loss."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Callable[[Tensor, Tensor | None], Head],
        teacher: Head,
        final: Tensor,
        targets: Tensor,
        parts: HeadLoss,
    ) -> Tensor:
        student = head(weight.to(teacher.weight.dtype), bias)
        total = torch.zeros((), dtype=torch.float32)
        row_gradient = torch.empty_like(rows, dtype=torch.float32)
        weight_gradient = torch.zeros_like(weight)
        bias_gradient = None if bias is None else torch.zeros_like(bias)
        for chunk in chunks(len(rows), len(weight)):
            logits = student.logits(rows[chunk])
            loss, gradient = _chunk_loss(logits, teacher, final[chunk], targets[chunk], parts)
            gradient *= student.slope(logits)
            gradient /= len(rows)
            total += loss / len(rows)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
            small = gradient.to(student.weight.dtype)
            row_gradient[chunk] = (small @ student.weight).float()
            weight_gradient += (small.T @ rows[chunk].to(small.dtype)).float()
        ctx.save_for_backward(row_gradient.to(rows.dtype), weight_gradient, bias_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        (factor,) = outputs
        gradients = [each if each is None else each * factor for each in ctx.saved_tensors]
        return (*gradients, None, None, None, None, None)


def _chunk_loss(
    logits: Tensor, teacher: Head, final: Tensor, targets: Tensor, parts: HeadLoss
) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and its gradient by the logits [rows, vocab]."""
    total = torch.zeros((), dtype=torch.float32)
    gradient = torch.zeros_like(logits)
    if parts.outputs:
        log_probabilities = logits.log_softmax(-1)
        total -= parts.outputs * log_probabilities.gather(1, targets[:, None]).sum()
        gradient += parts.outputs * log_probabilities.exp_()
        gradient.scatter_add_(1, targets[:, None], torch.full((len(targets), 1), -parts.outputs))
    if parts.logits:
        heat = parts.temperature
        wanted = teacher.logits(final) / heat
        tokens = None
        if 0 < parts.top_k < wanted.shape[1]:
            wanted, tokens = wanted.topk(parts.top_k, dim=-1)
        wanted = wanted.log_softmax(-1)
        shares = wanted.exp()
        own = (logits / heat).log_softmax(-1)
        seen = own if tokens is None else own.gather(1, tokens)
        total += parts.logits * heat**2 * (shares * (wanted - seen)).sum()
        gradient += parts.logits * heat * own.exp_()
        if tokens is None:
            gradient -= parts.logits * heat * shares
        else:
            gradient.scatter_add_(1, tokens, -parts.logits * heat * shares)
    return total, gradient
