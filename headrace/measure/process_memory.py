"""Memory of a process of the engine without a model, measured with a tiny one."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.measure.placed_model import open_model, stage_programs
from headrace.measure.run_memory import run_memory
from headrace.measure.tiny_model import write_tiny_model
from headrace.parallel.mesh import Mesh
from headrace.planner.memory import SHIPPED_PROCESS, ProcessMemory

_PROMPT, _OUTPUT, _VOCAB = 32, 8, 512

_RUN = """
import sys
from headrace import LLM, SamplingParams
from headrace.planner.host import resident_memory
with LLM(sys.argv[1]) as llm:
    prompt = {"prompt_token_ids": list(range(int(sys.argv[2])))}
    llm.generate(prompt, SamplingParams(max_tokens=int(sys.argv[3]), ignore_eos=True))
    print(resident_memory())
"""


def measure_process() -> ProcessMemory:
    """Run a tiny model in a new process, and return the bytes of all but the model."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder, _VOCAB)
        run = subprocess.run(
            [sys.executable, "-c", _RUN, str(folder), str(_PROMPT), str(_OUTPUT)],
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
            batch=1,
        )
    resident = int(run.stdout)
    base = resident - model.loaded - model.kv - model.activations
    return ProcessMemory(base=base, per_token=SHIPPED_PROCESS.per_token)
