"""Answers of models, read as they come: reasoning, content and calls of tools."""
