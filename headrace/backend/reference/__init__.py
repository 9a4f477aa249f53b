"""The reference backend in NumPy and float64, with which tests compare all others."""

from headrace.backend.reference.executable import compile, lower

__all__ = ["compile", "lower"]
