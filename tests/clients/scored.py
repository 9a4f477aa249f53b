"""The texts whose log-probabilities lm-eval and `LLM` must agree on."""

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a"),
    ("", "Once upon a time"),
    ("Zürich liegt am", " Zürichsee, 日本語 und 🎉"),
    ("def add(a, b):\n", "    return a + b\n"),
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Hello! How can I help you?"),
]
"""Contexts and continuations; an empty context stands for the prefix token."""
TEXTS = [
    "A water wheel turns falling water into useful work. " * 12,
    "Zürich, 日本語, and 🎉 in one line.",
    "One.",
]
WINDOW = 96
"""The context of a rolling perplexity, less than the tokens of the first text."""
