"""The KV that fits in memory next to the weights."""

from headrace.record import frozen

RUNTIME_BYTES = 150 << 20
"""Reserved for the interpreter, activations and tables."""


@frozen
class Fit:
    """Tokens and sequences of a model that fit in memory."""

    memory: int
    """Bytes available."""
    weights: int
    """Bytes of all weights."""
    kv_per_sequence: int
    """KV bytes of a sequence of full length."""
    context: int
    """Tokens of a sequence of full length."""
    to_run: int = RUNTIME_BYTES
    """Bytes reserved for the engine."""

    @property
    def kv_budget(self) -> int:
        """Bytes that remain for KV, at least 0."""
        return max(0, self.memory - self.weights - self.to_run)

    @property
    def tokens(self) -> int:
        """Tokens, in sequences of full length, that fit at the same time."""
        return self.kv_budget * self.context // self.kv_per_sequence

    @property
    def sequences(self) -> int:
        """Sequences of full length that fit at the same time."""
        return self.tokens // self.context
