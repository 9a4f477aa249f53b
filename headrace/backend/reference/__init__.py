"""The reference backend in NumPy and float64, with which tests compare all others."""

import numpy as np

from headrace.backend.reference.executable import compile, lower

__all__ = ["compile", "instructions", "lower"]


def instructions() -> str:
    """The version of NumPy, whose sums give the bits of results."""
    return f"numpy {np.__version__}"
