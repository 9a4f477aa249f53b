"""Measurements of models and machines, each with a Python function that the package exports."""
