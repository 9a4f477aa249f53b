"""A drafter that goes on learning from verified outputs (Online Speculative Decoding, Liu et al.
2024): the engine's part. The training is in `distil/online.py`, in a process of its own.
"""
