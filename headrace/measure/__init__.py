"""Measurements of models and machines: quality, speed, drafts, and a self-test of the kernels."""
