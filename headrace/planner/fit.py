"""What fits in memory: weights once, then KV blocks with what is left."""

from dataclasses import dataclass

RUNTIME_BYTES = 150 << 20
"""Set aside for the interpreter, activations and tables."""


@dataclass(frozen=True)
class Fit:
    """How much of a model fits in `memory` bytes."""

    memory: int
    weights: int
    kv_per_token: int
    context: int
    """Tokens of a full-length sequence."""

    @property
    def kv_budget(self) -> int:
        """Bytes left for KV, never below zero."""
        return max(0, self.memory - self.weights - RUNTIME_BYTES)

    @property
    def tokens(self) -> int:
        """Tokens that can have KV at the same time."""
        return self.kv_budget // self.kv_per_token

    @property
    def sequences(self) -> int:
        """Sequences of full length at the same time."""
        return self.tokens // self.context
