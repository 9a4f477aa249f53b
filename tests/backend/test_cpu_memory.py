"""Memory of a process with a loaded model."""

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
executable = compile_program("cpu", trace_model(checkpoint.spec, checkpoint.tensors), checkpoint.tensors, KvConfig((64,)), 2)
executable.wait_for_weights()
print(host.peak_memory(), executable.plan.weight_bytes)
"""  # noqa: E501


def test_weights_are_in_memory_once() -> None:
    """The pages of the file are released; they would add 98 MB."""
    child = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
    peak, weights = map(int, child.stdout.split())
    assert weights < peak < weights + (80 << 20)


MAP = """
import re
import sys
from pathlib import Path
from headrace.config import KvConfig
from headrace.model import trace_model
from tests.tiny import tiny_executable, tiny_model

PAGE = 2 << 20

def pages(nbytes):
    return -(-nbytes // PAGE) * PAGE

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

head_dim, dtype = int(sys.argv[1]), sys.argv[2]
model = tiny_model(0, dim=4 * head_dim, layers=5, heads=4, kv_heads=2, window=(0, 100, 0))
groups = trace_model(*model).kv_groups
kv = KvConfig(tuple(map(int, sys.argv[3:])), 32, dtype)
executable = tiny_executable(model, "cpu", kv)
predicted = [count * group.block_bytes(dtype, 32) for count, group in zip(kv.num_blocks, groups, strict=True)]
print(predicted, executable.plan.kv_bytes, [resident for size, resident in mapped() if size in map(pages, predicted)])
executable.close()
del executable
print([size for size, _ in mapped() if size in map(pages, predicted)])
"""  # noqa: E501


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(),
    reason="reads the maps of the process as Linux shows them",
)
@pytest.mark.parametrize("blocks", [(4096, 10240), (4099, 9997)])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "vector"),  # bytes of a token's key and value in one head
    [
        (16, "bf16", 64),
        (16, "f32", 128),
        (16, "int8", 40),
        (16, "int4", 40),
        (32, "k8v4", 32 + 16 + 8),
        (24, "bf16", 48 + 64),
        (6, "f32", 24 + 64),
    ],
)
def test_kv_bytes_equal_the_prediction(
    head_dim: int, dtype: str, vector: int, blocks: tuple[int, int]
) -> None:
    """Each KV group maps whole pages, and uses memory only once it is written."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [sys.executable, "-c", MAP, str(head_dim), dtype, *map(str, blocks)]
    child = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert child.returncode == 0, child.stderr
    predicted = [
        count * layers * 2 * 32 * vector for count, layers in zip(blocks, (3, 2), strict=True)
    ]  # 2 KV heads, 32 tokens
    assert child.stdout.splitlines() == [f"{predicted} {predicted} [0, 0]", "[]"]
