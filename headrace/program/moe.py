"""The ops of mixtures of experts (Shazeer et al. 2017), with costs as in `ops.py`."""

from typing import Literal

from headrace.program.op import Op, StepSize, Value, Weight
from headrace.program.ops import Activation, matmul_flops
from headrace.record import frozen


@frozen
class Route(Op):
    """out[t] = [expert, ..., weight, ...]: the `top_k` experts of row t, best first, and weights.

    The score is softmax or sigmoid of x[t]. The choice adds `bias`, and of equal experts takes
    the lower number. Only the best `top_groups` of `groups` take part, by the best expert
    (`softmax`) or the best two (`sigmoid`) (DeepSeek-V2 and V3, 2024).

    Weights are scores, divided by their sum if `normalised`, times `factor`. A row with a logit
    that is not finite goes to the first experts, with NaN as weights.
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
        """Number of operations; comparisons do not count."""
        scores = {"softmax": 5, "sigmoid": 3}[self.scoring] + (self.bias is not None)
        sums = 2 * self.groups if self.groups > 1 and self.scoring == "sigmoid" else 0
        weights = (1 + 2 * self.normalised) * self.top_k
        return self.x.num_rows(step) * (scores * self.x.width + sums + weights)


@frozen
class Experts(Op):
    """out[t] = sum over the experts e of row t of weight_e * down_e(glu(gate_e x, up_e x)).

    The sum has the order of the routing. Weights of experts without rows are not read.
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
        """Expected number of experts of `rows` rows, if all are equally likely."""
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
    """out[t] = x[t] / (1 + exp(-gate[t]))"""

    out: Value
    x: Value
    gate: Value

    def flops(self, step: StepSize) -> int:
        return self.out.num_rows(step) * self.out.width
