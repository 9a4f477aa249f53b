"""The CPU backend: C++ kernels for AVX-512, AVX2, NEON and portable code."""

from headrace.backend.cpu.executable import compile, instructions, lower

__all__ = ["compile", "instructions", "lower"]
