"""The ops of mixtures of experts; they say what they cost as those in `ops.py` do."""

from typing import Literal

from headrace.program.op import Op, StepSize, Value, Weight
from headrace.program.ops import Activation, matmul_flops
from headrace.record import frozen


@frozen
class Route(Op):
    """Which experts a row goes to, and with what weights: out[t] = `top_k` expert numbers, best
    first, then their weights.

    Scores are the softmax or the sigmoid of the row's logits. The best by score plus `bias` are
    chosen, of equal ones the lower number; with `groups`, among those of the `top_groups` adjacent
    groups of experts alone whose best (`softmax`) or best two (`sigmoid`) are highest in sum
    (DeepSeek-V2 and V3, 2024). Their scores are the weights: to a sum of 1 where they are to be
    `normalised`, and then times `factor`. A row with a logit that is not finite goes to the first
    experts, with weights that are not numbers.
    """

    out: Value
    x: Value
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    normalised: bool
    factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    bias: Weight | None = None

    def flops(self, step: StepSize) -> int:
        """Those of the scores, of the sums for groups, and of the weights; the choice is
        comparisons.
        """
        scores = {"softmax": 5, "sigmoid": 3}[self.scoring] + (self.bias is not None)
        sums = 2 * self.groups if self.groups > 1 and self.scoring == "sigmoid" else 0
        weights = (1 + 2 * self.normalised) * self.top_k
        return self.x.num_rows(step) * (scores * self.x.width + sums + weights)


@frozen
class Experts(Op):
    """out[t] = sum over the experts e of row t, in the order of its routing, of weight *
    down_e(glu(gate_e x, up_e x)).

    A mixture of gated units (Shazeer et al. 2017; Jiang et al. 2024). An expert's weights are read
    if a row goes there, once for all.
    """

    out: Value
    x: Value
    routing: Value
    gate: tuple[Weight, ...]
    up: tuple[Weight, ...]
    down: tuple[Weight, ...]
    activation: Activation
    gate_bias: tuple[Weight, ...] = ()
    up_bias: tuple[Weight, ...] = ()
    down_bias: tuple[Weight, ...] = ()

    @property
    def top_k(self) -> int:
        return self.routing.width // 2

    def distinct_experts(self, rows: int) -> float:
        """Experts that so many rows go to, in the mean, where every row is as likely to go to any
        of them.
        """
        return len(self.gate) * (1 - (1 - self.top_k / len(self.gate)) ** rows)

    def flops(self, step: StepSize) -> int:
        return matmul_flops(
            self.x.num_rows(step) * self.top_k, self.gate[0], self.up[0], self.down[0]
        )

    def bytes(self, step: StepSize) -> int:
        return int(
            super().bytes(step) * self.distinct_experts(self.x.num_rows(step)) / len(self.gate)
        )


@frozen
class GateRows(Op):
    """out[t] = x[t] / (1 + exp(-gate[t])), where a gate is one number for its row"""

    out: Value
    x: Value
    gate: Value

    def flops(self, step: StepSize) -> int:
        return self.out.num_rows(step) * self.out.width
