"""Triton kernels, one file each: beside each a function that binds it to tensors (`launch.py`)."""
