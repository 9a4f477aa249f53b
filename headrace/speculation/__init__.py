"""Speculative decoding: proposers, and policies that decide when drafting pays."""
