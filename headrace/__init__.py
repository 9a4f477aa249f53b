"""Headrace: a transformer inference engine for the hardware you have."""

TYPE_CHECKING = False  # and not that of `typing`, which takes longer to import than all this
if TYPE_CHECKING:
    from typing import Any

    from headrace.async_llm import AsyncLLM
    from headrace.llm import LLM
    from headrace.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
    from headrace.structured_outputs import StructuredOutputs

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_HOME = {"LLM": "llm", "AsyncLLM": "async_llm", "StructuredOutputs": "structured_outputs"}
_HOME |= dict.fromkeys(
    ("CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"), "request"
)


def __getattr__(name: str) -> "Any":
    """Import the public names when they are first used, so that `import headrace` and the command
    line start fast.
    """
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"headrace.{_HOME[name]}"), name)
    if name == "__version__":
        from importlib import (
            metadata,
        )  # which takes longer than any other module: `from headrace import _native` comes here too

        return metadata.version("headrace")
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
