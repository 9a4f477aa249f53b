"""Triton kernels, one file each, with the function that binds each kernel to tensors
(`launch.py`).
"""

from headrace.backend.cuda.interpreter import is_interpreting, patch_interpreter

if is_interpreting():
    patch_interpreter()  # before kernels are defined
