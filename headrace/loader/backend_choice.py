"""Chooses the backend of a model: the named backend, or for `auto` the GPU if the model fits
there.
"""

import logging
from dataclasses import replace
from typing import NamedTuple

from headrace.backend_traits import BackendName, check_kv_dtype, traits_of
from headrace.checkpoint.key_biases import has_large_key_biases
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.errors import MemoryLimitError, RequestError, UnsupportedModelError
from headrace.loader.drafts import DraftCheckpoints, target_program
from headrace.loader.memory import fit_memory
from headrace.parallel.config import mesh_of
from headrace.planner import gpu
from headrace.planner.gpu import GpuHost

_log = logging.getLogger("headrace.loader")


class BackendChoice(NamedTuple):
    """A backend, and a remark if the choice may surprise."""

    backend: BackendName
    remark: str = ""
    """Reason not to use an existing GPU, or a warning that kernels are interpreted."""


def with_backend(
    config: EngineConfig, checkpoint: Checkpoint, drafts: DraftCheckpoints | None = None
) -> EngineConfig:
    """Return the configuration with `auto` replaced by a backend, and log a remark if it has one.

    Raises RequestError if the backend cannot run here, or does not support the
    `kv_dtype`.
    """
    config = with_kv_dtype(config, checkpoint)
    choice = choose_backend(config, checkpoint, drafts)
    if choice.remark:
        _log.warning("%s", choice.remark)
    check_kv_dtype(choice.backend, config.kv_format)
    return replace(config, backend=choice.backend)


def with_kv_dtype(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """Return the configuration with the model's number format of KV in place of `auto`.

    Where key biases are large, bf16 loses digits of what is left too: the scores are large.
    """
    if config.kv_dtype != "auto":
        return config
    is_biased = has_large_key_biases(checkpoint.tensors)
    return replace(config, kv_dtype="f16" if is_biased else "bf16")


def choose_backend(
    config: EngineConfig, checkpoint: Checkpoint, drafts: DraftCheckpoints | None = None
) -> BackendChoice:
    """Choose the backend of a model and its draft models.

    Raises RequestError if the configuration names a backend that cannot run here.
    """
    if config.backend != "auto":
        if config.traits.on_gpu:
            return check_gpu_backend(gpu.find_gpu_host())
        return BackendChoice(config.backend)
    if mesh_of(config).ranks > 1:
        return _cpu(gpu.find_gpu_host(), "several ranks run on the CPU")

    choice = auto_backend(gpu.find_gpu_host())
    if not traits_of(choice.backend).on_gpu:
        return choice
    on_gpu = replace(with_kv_dtype(config, checkpoint), backend=choice.backend)
    obstacle = _gpu_obstacle(on_gpu, checkpoint, drafts or DraftCheckpoints())
    return BackendChoice("cpu", _unused_gpu(obstacle)) if obstacle else choice


def auto_backend(host: GpuHost) -> BackendChoice:
    """Return the backend that `auto` means on this machine, if the model fits in GPU memory."""
    return _cpu(host, host.obstacle) if host.obstacle else BackendChoice("cuda")


def check_gpu_backend(host: GpuHost) -> BackendChoice:
    """Return the `cuda` backend, in Triton's interpreter if TRITON_INTERPRET is set.

    Raises RequestError, which says what to do, if the backend cannot run on this
    machine.
    """
    if not host.interprets:
        if host.obstacle:
            raise RequestError(f"backend 'cuda' cannot run here: {host.obstacle}")
        return BackendChoice("cuda")
    if host.absent:
        raise RequestError(f"backend 'cuda' needs {' and '.join(host.absent)}; {gpu.INSTALL}")
    return BackendChoice(
        "cuda",
        "the kernels of backend 'cuda' are interpreted, thousands of times slower than on a GPU, "
        "because TRITON_INTERPRET is set",
    )


def _cpu(host: GpuHost, reason: str) -> BackendChoice:
    return BackendChoice("cpu", _unused_gpu(reason) if host.gpu else "")


def _unused_gpu(reason: str) -> str:
    return f"the GPU is not used: {reason}"


def _gpu_obstacle(config: EngineConfig, checkpoint: Checkpoint, drafts: DraftCheckpoints) -> str:
    """Return why the model cannot run on the GPU, or an empty string if it can."""
    max_model_len = config.max_model_len or checkpoint.spec.max_context
    try:
        check_kv_dtype(config.backend, config.kv_format)
        program = target_program(config, checkpoint)
        fit_memory(config, checkpoint, program, drafts, max_model_len)
    except ImportError as error:
        return f"torch or triton cannot be imported: {error}"
    except (RequestError, UnsupportedModelError, MemoryLimitError) as error:
        return str(error)
    return ""
