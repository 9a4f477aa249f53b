"""What the process of a loaded model has in memory."""

import subprocess
import sys

LOAD = """
from headrace.backend import compile_program
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.planner import host

checkpoint = open_checkpoint(resolve("smollm2", progress=False))
executable = compile_program("cpu", trace_model(checkpoint.spec, checkpoint.tensors), checkpoint.tensors, KvConfig(64), 2)
print(host.peak_memory(), executable.plan.weight_bytes)
"""


def test_weights_are_in_memory_once() -> None:
    """Packed, and not as the file has them too: that would be 98 MB more."""
    child = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
    peak, weights = map(int, child.stdout.split())
    assert weights < peak < weights + (80 << 20)
