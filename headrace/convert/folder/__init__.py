"""Writes models as Hugging Face folders."""
