"""Speculative decoding: what proposes draft tokens, when drafting pays, and how much to draft."""
