"""The reference backend: NumPy in float64, op by op. Tests compare all other backends with it."""

from headrace.backend.reference.executable import compile, lower

__all__ = ["compile", "lower"]
