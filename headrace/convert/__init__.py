"""Quantising models: which matrices, by which method, and what the files of the result are."""
