"""What fits in memory: weights once, then KV blocks with what is left."""

from headrace.record import frozen

RUNTIME_BYTES = 150 << 20
"""Set aside for the interpreter, activations and tables."""


@frozen
class Fit:
    """How much of a model fits in `memory` bytes."""

    memory: int
    weights: int
    kv_per_sequence: int
    """Bytes that a sequence of full length holds at once."""
    context: int
    """Its tokens."""
    to_run: int = RUNTIME_BYTES
    """Bytes that are set aside for what runs it."""

    @property
    def kv_budget(self) -> int:
        """Bytes left for KV, never below zero."""
        return max(0, self.memory - self.weights - self.to_run)

    @property
    def tokens(self) -> int:
        """Tokens of such sequences that fit at the same time."""
        return self.kv_budget * self.context // self.kv_per_sequence

    @property
    def sequences(self) -> int:
        """Sequences of full length at the same time."""
        return self.tokens // self.context
