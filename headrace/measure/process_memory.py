"""Memory of a process of the engine without a model, measured with a tiny one."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.measure.placed_model import open_model, stage_programs
from headrace.measure.run_memory import run_memory
from headrace.measure.tiny_model import write_tiny_model
from headrace.parallel.mesh import Mesh
from headrace.planner.host import available_memory
from headrace.planner.memory import SHIPPED_PROCESS, ProcessMemory

_BATCH, _PROMPT, _OUTPUT, _VOCAB = 8, 500, 12, 512
_REAL_MODEL_BYTES = 5_000_000
"""Bytes that pages of a real model's files and longer outputs add, by `benchmarks/memory.py`."""

_RUN = """
import sys
from headrace import LLM, SamplingParams
from headrace.planner.host import resident_memory
with LLM(sys.argv[1]) as llm:
    batch, prompt, output = map(int, sys.argv[2:])
    prompts = [
        {"prompt_token_ids": [(7 * i + 3 * j) % 90 for j in range(prompt)]} for i in range(batch)
    ]
    llm.generate(prompts, SamplingParams(max_tokens=output, ignore_eos=True))
    print(resident_memory())
"""


def measure_process() -> ProcessMemory:
    """Run a tiny model in a new process, and return the bytes of all but the model."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder, _VOCAB)
        run = subprocess.run(
            [sys.executable, "-c", _RUN, str(folder), *map(str, (_BATCH, _PROMPT, _OUTPUT))],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        checkpoint = open_model(str(folder))
        model = run_memory(
            checkpoint,
            stage_programs(checkpoint, "cpu", Mesh())[0],
            ProcessMemory(base=0, per_token=SHIPPED_PROCESS.per_token),
            kv_dtype="bf16",
            prompt=_PROMPT,
            output=_OUTPUT,
            batch=_BATCH,
            memory=available_memory(),
        )
    resident = int(run.stdout)
    used = model.loaded + model.kv + model.kv_ahead + model.activations
    base = resident - used + _REAL_MODEL_BYTES
    return ProcessMemory(base=base, per_token=SHIPPED_PROCESS.per_token)
