"""The reference backend: NumPy in float64, op by op, which tests hold the other backends to."""

from headrace.backend.reference.executable import compile, lower

__all__ = ["compile", "lower"]
