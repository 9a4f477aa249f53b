"""What the process of a loaded model has in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


MAP = """
import re
from pathlib import Path
from headrace.config import KvConfig
from tests.tiny import tiny_executable, tiny_model

def mapped():
    found, size = [], 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            size = int(head[2], 16) - int(head[1], 16)
        elif line.startswith("Rss:"):
            resident = 1024 * int(line.split()[1])
        elif line.startswith("VmFlags:") and "hg" in line.split():
            found.append((size, resident))
    return found

model = tiny_model(0, dim=64, heads=4, kv_heads=2)  # heads of 16 numbers, which are stored without padding
kv = KvConfig(NUM_BLOCKS, 32, "DTYPE")
executable = tiny_executable(model, "cpu", kv)
predicted = kv.num_blocks * kv.block_size * model[0].kv_bytes_per_token(WIDTH)
print(predicted, [resident for size, resident in mapped() if size == predicted])
executable.close()
del executable
print([size for size, _ in mapped() if size == predicted])
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads the maps of the process as Linux shows them")
@pytest.mark.parametrize(("dtype", "width"), [("bf16", 2), ("f32", 4)])
def test_kv_takes_what_is_predicted_to_the_byte(dtype: str, width: int) -> None:
    """And nothing of it is in memory before it is used."""
    code = MAP.replace("NUM_BLOCKS", "10240").replace("DTYPE", dtype).replace("WIDTH", str(width))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == [f"{10240 * 32 * 2 * 2 * 2 * 16 * width} [0]", "[]"]
