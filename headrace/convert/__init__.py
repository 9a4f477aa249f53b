"""Quantising models and writing them to files."""
