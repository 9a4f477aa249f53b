"""Headrace: a transformer inference engine for the hardware you have."""

TYPE_CHECKING = False  # importing the name from `typing` takes longer than this whole module
if TYPE_CHECKING:
    from typing import Any

    from headrace.async_llm import AsyncLLM
    from headrace.llm import LLM
    from headrace.measure.bench import bench_latency, bench_throughput
    from headrace.measure.calibrate import calibrate
    from headrace.measure.climb import climb
    from headrace.measure.evaluate import evaluate
    from headrace.measure.plan import plan
    from headrace.measure.profile import profile
    from headrace.measure.selftest import selftest
    from headrace.measure.tune import tune
    from headrace.outputs import CompletionOutput, Logprob, RequestOutput
    from headrace.sampling_params import ReasoningMarkers, SamplingParams, ThinkingBudget
    from headrace.simulator.simulate import simulate
    from headrace.structured_outputs import StructuredOutputs

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "ReasoningMarkers",
    "ThinkingBudget",
    "__version__",
    "bench_latency",
    "bench_throughput",
    "calibrate",
    "climb",
    "evaluate",
    "plan",
    "profile",
    "selftest",
    "simulate",
    "tune",
]

_MODULES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StructuredOutputs": "structured_outputs",
    "ReasoningMarkers": "sampling_params",
    "ThinkingBudget": "sampling_params",
    "bench_latency": "measure.bench",
    "bench_throughput": "measure.bench",
    "calibrate": "measure.calibrate",
    "climb": "measure.climb",
    "evaluate": "measure.evaluate",
    "plan": "measure.plan",
    "profile": "measure.profile",
    "selftest": "measure.selftest",
    "simulate": "simulator.simulate",
    "tune": "measure.tune",
}
"""Modules of the public names."""


def __getattr__(name: str) -> "Any":
    """Import a public name at its first use, so that the command line starts fast."""
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"headrace.{_MODULES[name]}"), name)
    if name == "__version__":
        # `from headrace import _native` calls this function, too, and this import is slow.
        from importlib import metadata

        return metadata.version("headrace")
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
