"""The use of this machine by a model that another process runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.backend import lower_program
from headrace.backend_traits import KvDtype
from headrace.checkpoint.load import open_checkpoint
from headrace.loader.drafts import model_program
from headrace.loader.early_exit import with_exit_map
from headrace.loader.options import engine_config
from headrace.planner.utilisation import UseMeter, meter_of


def open_meter(
    path: Path, backend: str, threads: int, kv_dtype: KvDtype, modes: Mapping[str, Any]
) -> UseMeter | None:
    """Open a model, without its weights. None if no command has measured the machine.

    `modes`: the lossy options of the engine. Raises the errors of `open_checkpoint`, RequestError
    for an unknown backend or option, and the errors of calibration files.
    """
    config = engine_config({**modes, "backend": backend})
    checkpoint = with_exit_map(open_checkpoint(path), config)
    program = model_program(config, checkpoint)
    program = lower_program(backend, program, checkpoint.tensors)
    return meter_of(program, backend, threads, kv_dtype)
