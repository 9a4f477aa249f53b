"""Parsers of model output: they split streamed text into reasoning, content and tool calls."""
