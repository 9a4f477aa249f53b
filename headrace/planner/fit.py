"""The KV that fits in memory next to the weights."""

from headrace.record import frozen

RUNTIME_BYTES = 150 << 20
"""Reserved for the interpreter, activations and tables."""


@frozen
class Fit:
    memory: int
    weights: int
    kv_per_sequence: int
    """Bytes at full length."""
    context: int
    to_run: int = RUNTIME_BYTES
    """Bytes of the engine."""
    adapter: int = 0
    """Bytes of an adapter."""

    @property
    def kv_budget(self) -> int:
        """Bytes that remain for KV."""
        return max(0, self.memory - self.weights - self.adapter - self.to_run)

    @property
    def tokens(self) -> int:
        return self.kv_budget * self.context // self.kv_per_sequence

    @property
    def sequences(self) -> int:
        return self.tokens // self.context
