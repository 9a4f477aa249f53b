"""Trains small models and draft heads on recorded answers of a model.

`record.py` lets the engine answer prompts and keeps the answers with their rows (`answers.py`).
"""
