"""Writes folders in Hugging Face layout."""
