"""Programs of a single mixture-of-experts layer."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.batch import RaggedBatch, ints
from headrace.program.op import Value, Weight
from headrace.program.ops import Activation
from headrace.program.trace import Program, Tracer, trace
from headrace.quant.formats import StoredTensor
from tests.backend.stored import random_stored
from tests.tiny import Tensors

Rows = NDArray[np.float32]


@dataclass(frozen=True)
class MoeModel:
    """Experts over rows of `dim` numbers. The first numbers of a row, one per expert, are the
    routing logits.
    """

    experts: int = 8
    top_k: int = 2
    dim: int = 64
    hidden: int = 96
    format: str = "F32"
    down_format: str = ""
    """Format of the down matrix; empty: the format of gate and up."""
    has_biases: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    factor: float = 1.0
    groups: tuple[int, int] = (1, 1)
    has_route_bias: bool = False
    activation: Activation = "silu"
    layers: int = 1
    """How many times the experts run, each time over their last result."""

    @property
    def tensors(self) -> Tensors:
        """Return random weights. The router copies the logits from the row, so that every backend
        routes alike.
        """
        shapes = {
            "gate": (self.hidden, self.dim),
            "up": (self.hidden, self.dim),
            "down": (self.dim, self.hidden),
        }
        formats = {"gate": self.format, "up": self.format, "down": self.down_format or self.format}
        found = {
            "router": StoredTensor.from_floats(
                "router", np.eye(self.experts, self.dim, dtype=np.float32)
            )
        }
        for part, (rows, cols) in shapes.items():
            for e in range(self.experts):
                name = f"{part}.{e}"
                found[name] = random_stored(
                    formats[part], rows, cols, 100 * e + rows + len(part), name, cols**-0.5
                )
                found[f"{name}.bias"] = _vector(f"{name}.bias", rows, e + rows)
        found["router.bias"] = _vector("router.bias", self.experts, 7)
        return found

    def route(self, g: Tracer, logits: Value) -> Value:
        bias = g.vector("router.bias", self.experts) if self.has_route_bias else None
        options = {
            "normalised": self.normalised,
            "factor": self.factor,
            "groups": self.groups,
            "bias": bias,
        }
        return g.route(logits, self.top_k, self.scoring, **options)

    def mix(self, g: Tracer, x: Value, routing: Value) -> Value:
        sizes = {
            "gate": (self.hidden, self.dim),
            "up": (self.hidden, self.dim),
            "down": (self.dim, self.hidden),
        }

        def weights(part: str) -> tuple[Weight, ...]:
            return tuple(g.weight(f"{part}.{e}", *sizes[part]) for e in range(self.experts))

        def biases(part: str) -> tuple[Weight, ...]:
            names = (f"{part}.{e}.bias" for e in range(self.experts if self.has_biases else 0))
            return tuple(g.vector(name, sizes[part][0]) for name in names)

        parts = ("gate", "up", "down")
        return g.experts(
            x,
            routing,
            *map(weights, parts),
            self.activation,
            (biases("gate"), biases("up"), biases("down")),
        )

    def program(self) -> tuple[Program, Tensors]:
        """Return the program from input rows to the experts' results."""

        def forward(g: Tracer) -> Value:
            x = g.input(self.dim)
            for _ in range(self.layers):
                logits = g.linear(x, g.weight("router", self.experts, self.dim))
                x = self.mix(g, x, self.route(g, logits))
            return g.gather_rows(x)

        tensors = self.tensors
        return trace(forward, tensors), tensors

    def routing(self) -> tuple[Program, Tensors]:
        """Return the program from logits to the routing."""
        tensors = self.tensors
        return trace(
            lambda g: g.gather_rows(self.route(g, g.input(self.experts))), tensors
        ), tensors


def _vector(name: str, size: int, seed: int) -> StoredTensor:
    return replace(random_stored("F32", 1, size, seed, name), shape=(size,))


def rows_batch(x: Rows) -> RaggedBatch:
    """Return a step of one-row sequences with these input rows, and logits for all rows."""
    n = len(x)
    zeros, order = ints([0] * n), ints(list(range(n)))
    return RaggedBatch(
        zeros, zeros, ints(list(range(n + 1))), zeros, zeros + 1, (), None, order, order, None, x
    )
