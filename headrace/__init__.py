"""Headrace: a transformer inference engine for the hardware you have."""

TYPE_CHECKING = False  # and not that of `typing`, which takes longer to import than all this
if TYPE_CHECKING:
    from typing import Any

    from headrace.async_llm import AsyncLLM
    from headrace.llm import LLM
    from headrace.measure.bench import bench_latency, bench_throughput
    from headrace.measure.calibrate import calibrate
    from headrace.measure.evaluate import evaluate
    from headrace.measure.profile import profile
    from headrace.measure.selftest import selftest
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
    "bench_latency",
    "bench_throughput",
    "calibrate",
    "evaluate",
    "profile",
    "selftest",
]

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "request",
    "Logprob": "request",
    "RequestOutput": "request",
    "SamplingParams": "request",
    "StructuredOutputs": "structured_outputs",
    "bench_latency": "measure.bench",
    "bench_throughput": "measure.bench",
    "calibrate": "measure.calibrate",
    "evaluate": "measure.evaluate",
    "profile": "measure.profile",
    "selftest": "measure.selftest",
}
"""The module of each public name."""


def __getattr__(name: str) -> "Any":
    """Import the public names when they are first used, so that `import headrace` and the command
    line start fast.
    """
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"headrace.{_MODULES[name]}"), name)
    if name == "__version__":
        from importlib import (
            metadata,
        )  # which takes longer than any other module: `from headrace import _native` comes here too

        return metadata.version("headrace")
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
