"""Which backend a model runs on: the one that is named, or with `auto` the GPU where there is one
that can have it, else the CPU.
"""

import logging
from dataclasses import replace
from typing import NamedTuple

from headrace.backend_traits import BackendName, check_kv_dtype, traits_of
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.errors import MemoryLimitError, RequestError, UnsupportedModelError
from headrace.loader.drafts import DraftCheckpoints, target_program
from headrace.loader.memory import fit_memory
from headrace.parallel.config import mesh_of
from headrace.planner import gpu
from headrace.planner.gpu import GpuHost

_log = logging.getLogger("headrace.loader")


class Choice(NamedTuple):
    """A backend, and why it is not another one that one might expect."""

    backend: BackendName
    remark: str = ""
    """Why a GPU that is there is not used, or that kernels are interpreted; mostly empty."""


def with_backend(
    config: EngineConfig, checkpoint: Checkpoint, drafts: DraftCheckpoints | None = None
) -> EngineConfig:
    """The same configuration with the name of the backend that the model runs on, and a line in the
    log where there is a remark.

    Raises RequestError for a backend that cannot run here, and for KV that it does not keep.
    """
    choice = choose(config, checkpoint, drafts)
    if choice.remark:
        _log.warning("%s", choice.remark)
    chosen = replace(config, backend=choice.backend)
    check_kv_dtype(chosen.backend, chosen.kv_dtype)
    return chosen


def choose(
    config: EngineConfig, checkpoint: Checkpoint, drafts: DraftCheckpoints | None = None
) -> Choice:
    """The backend of a model, with what drafts for it. Raises RequestError for one that cannot run
    here.
    """
    if config.backend != "auto":
        return named_gpu(gpu.look()) if config.traits.on_gpu else Choice(config.backend)
    if mesh_of(config).ranks > 1:
        return _beside_gpu(gpu.look(), "several ranks run on the CPU")
    choice = automatic(gpu.look())
    if not traits_of(choice.backend).on_gpu:
        return choice
    why = _misfit(replace(config, backend=choice.backend), checkpoint, drafts or DraftCheckpoints())
    return Choice("cpu", _unused(why)) if why else choice


def automatic(host: GpuHost) -> Choice:
    """What `auto` stands for on such a machine, for a model that fits in the memory of its GPU."""
    return _beside_gpu(host, host.obstacle) if host.obstacle else Choice("cuda")


def named_gpu(host: GpuHost) -> Choice:
    """The `cuda` backend, in the interpreter where Triton is told so. Raises RequestError where it
    cannot run, with what to do.
    """
    if not host.interprets:
        if host.obstacle:
            raise RequestError(f"the cuda backend cannot run here: {host.obstacle}")
        return Choice("cuda")
    if host.absent:
        raise RequestError(f"the cuda backend needs {' and '.join(host.absent)}: {gpu.INSTALL}")
    return Choice(
        "cuda",
        "the kernels of the cuda backend are interpreted, thousands of times slower than "
        "on a GPU: TRITON_INTERPRET is set",
    )


def _beside_gpu(host: GpuHost, why: str) -> Choice:
    """The CPU, with a remark where there is a GPU."""
    return Choice("cpu", _unused(why) if host.gpu else "")


def _unused(why: str) -> str:
    return f"the GPU is not used: {why}"


def _misfit(config: EngineConfig, checkpoint: Checkpoint, drafts: DraftCheckpoints) -> str:
    """Why a model cannot run on the GPU; empty where it can."""
    try:
        check_kv_dtype(config.backend, config.kv_dtype)
        fit_memory(
            config,
            checkpoint,
            target_program(config, checkpoint),
            drafts,
            config.max_model_len or checkpoint.spec.max_context,
        )
    except ImportError as error:
        return f"torch or triton cannot be imported: {error}"
    except (RequestError, UnsupportedModelError, MemoryLimitError) as error:
        return str(error)
    return ""
