"""Writes models as GGUF files."""
