"""The use of this machine by a model that another process runs."""

from pathlib import Path

from headrace.backend import lower_program
from headrace.backend_traits import KvDtype
from headrace.checkpoint.load import open_checkpoint
from headrace.model import trace_model
from headrace.planner import hardware
from headrace.planner.utilisation import UseMeter, planned, roofs_of
from headrace.program.kv import number_bytes


def open_meter(path: Path, backend: str, threads: int, kv_dtype: KvDtype) -> UseMeter | None:
    """Open a model, without its weights. None if no command has measured the machine.

    Raises the errors of `open_checkpoint`, and RequestError for an unknown backend.
    """
    machine = hardware.cached_machine(threads, backend)
    if machine is None:
        return None
    checkpoint = open_checkpoint(path)
    traced = trace_model(checkpoint.spec, checkpoint.tensors)
    program = lower_program(backend, traced, checkpoint.tensors)
    kv_bytes = number_bytes(program.kv_groups, kv_dtype)
    timer = planned(program, backend, threads, machine)
    return UseMeter(program, kv_bytes, roofs_of(machine), timer)
