"""The use of this machine by a model that another process runs."""

from pathlib import Path

from headrace.backend import lower_program
from headrace.backend_traits import KvDtype
from headrace.checkpoint.load import open_checkpoint
from headrace.model import trace_model
from headrace.planner.utilisation import UseMeter, meter_of


def open_meter(path: Path, backend: str, threads: int, kv_dtype: KvDtype) -> UseMeter | None:
    """Open a model, without its weights. None if no command has measured the machine.

    Raises the errors of `open_checkpoint`, and RequestError for an unknown backend.
    """
    checkpoint = open_checkpoint(path)
    traced = trace_model(checkpoint.spec, checkpoint.tensors)
    program = lower_program(backend, traced, checkpoint.tensors)
    return meter_of(program, backend, threads, kv_dtype)
