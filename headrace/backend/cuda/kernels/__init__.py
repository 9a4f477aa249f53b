"""Triton kernels, one file each, with the function that binds each kernel to tensors
(`launch.py`).
"""
