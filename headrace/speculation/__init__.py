"""Speculative decoding: which tokens to draft, when drafting pays, and how much to draft."""
