"""Chooses the backend of a model: the named backend, or for `auto` the GPU if the model fits
there.
"""

import logging
from dataclasses import replace
from typing import NamedTuple

from headrace.backend_traits import BackendName, check_kv_dtype, check_top_blocks, traits_of
from headrace.checkpoint.key_biases import has_large_key_biases
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.errors import MemoryLimitError, RequestError, UnsupportedModelError
from headrace.loader.drafts import DraftCheckpoints, target_program
from headrace.loader.memory import fit_context
from headrace.parallel.config import mesh_of, ranks_of_host
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

    On a GPU, `max_model_len` becomes the longest context that fits, if the model's does not.
    Raises RequestError if the backend cannot run here, or does not support the
    `kv_dtype`.
    """
    config = with_kv_dtype(config, checkpoint)
    choice = choose_backend(config, checkpoint, drafts)
    if choice.remark:
        _log.warning("%s", choice.remark)
    check_kv_dtype(choice.backend, config.kv_format)
    for option in ("attention_top_blocks", "draft_top_blocks"):
        check_top_blocks(choice.backend, option, getattr(config, option))
    if traits_of(choice.backend).on_gpu:
        _check_fp8(config, checkpoint, drafts or DraftCheckpoints())
    return _with_context(replace(config, backend=choice.backend), checkpoint, drafts)


def _check_fp8(config: EngineConfig, checkpoint: Checkpoint, drafts: DraftCheckpoints) -> None:
    """Raise RequestError or UnsupportedModelError if the GPU lacks fp8, and the options or the
    weights need it.
    """
    host = gpu.find_gpu_host()
    why = host.gpu.without_fp8 if host.gpu and not host.interprets else ""
    if not why:
        return
    if config.kv_format == "fp8":
        raise RequestError(f"kv_dtype 'fp8' is not supported: {why}; choose bf16 or int8")
    for tensors in (checkpoint.tensors, drafts.draft.tensors if drafts.draft else {}):
        for tensor in tensors.values():
            if tensor.format.spec and tensor.format.spec.codebook == "e4m3":
                raise UnsupportedModelError(
                    f"tensor '{tensor.name}' is fp8: {why}; choose backend cpu, or another version "
                    "of the model"
                )


def _with_context(
    config: EngineConfig, checkpoint: Checkpoint, drafts: DraftCheckpoints | None
) -> EngineConfig:
    """Return the configuration with the longest context that fits on the GPU.

    It is unchanged if all of the model's context fits, and if nothing does: loading says so.
    """
    if config.max_model_len or not config.traits.on_gpu:
        return config
    program = target_program(config, checkpoint)
    try:
        context = fit_context(config, checkpoint, program, drafts or DraftCheckpoints())
    except MemoryLimitError:
        return config
    if context == checkpoint.spec.max_context:
        return config
    _log.warning(
        "max_model_len is %s, because the GPU has no memory for a sequence of all %s tokens of the "
        "model's context; set max_model_len, or choose kv_dtype int8, to change it",
        f"{context:,}",
        f"{checkpoint.spec.max_context:,}",
    )
    return replace(config, max_model_len=context)


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
    ranks = ranks_of_host(mesh_of(config))
    if config.backend != "auto":
        if config.traits.on_gpu:
            return check_gpu_backend(gpu.find_gpu_host(), ranks)
        return BackendChoice(config.backend)

    host = gpu.find_gpu_host()
    choice = auto_backend(host, ranks)
    if not traits_of(choice.backend).on_gpu:
        return choice
    on_gpu = replace(with_kv_dtype(config, checkpoint), backend=choice.backend)
    obstacle = _gpu_obstacle(on_gpu, checkpoint, drafts or DraftCheckpoints(), host)
    return BackendChoice("cpu", _unused_gpu(obstacle)) if obstacle else choice


def auto_backend(host: GpuHost, ranks: int = 1) -> BackendChoice:
    """Return the backend that `auto` means on this machine, if the model fits in GPU memory."""
    obstacle = host.obstacle or _too_few_gpus(host, ranks)
    return _cpu(host, obstacle) if obstacle else BackendChoice("cuda")


def _too_few_gpus(host: GpuHost, ranks: int) -> str:
    count = host.gpu.count if host.gpu else 0
    if ranks <= count:
        return ""
    return (
        f"tensor_parallel_size x pipeline_parallel_size is {ranks} ranks on this machine, which "
        f"has {count} GPU{'' if count == 1 else 's'}: lower these sizes to {count}, or choose "
        "backend cpu"
    )


def check_gpu_backend(host: GpuHost, ranks: int = 1) -> BackendChoice:
    """Return the `cuda` backend, in Triton's interpreter if TRITON_INTERPRET is set.

    Each of the `ranks` of this machine has a GPU of its own.

    Raises RequestError, which says what to do, if the backend cannot run on this
    machine.
    """
    if not host.interprets:
        if obstacle := host.obstacle or _too_few_gpus(host, ranks):
            raise RequestError(f"backend 'cuda' cannot run here: {obstacle}")
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


def _gpu_obstacle(
    config: EngineConfig, checkpoint: Checkpoint, drafts: DraftCheckpoints, host: GpuHost
) -> str:
    """Return why the model cannot run on the GPU, or an empty string if it can."""
    try:
        check_kv_dtype(config.backend, config.kv_format)
        _check_fp8(config, checkpoint, drafts)
        program = target_program(config, checkpoint)
        fit_context(config, checkpoint, program, drafts)
    except ImportError as error:
        return f"torch or triton cannot be imported: {error}"
    except (RequestError, UnsupportedModelError) as error:
        return str(error)
    except MemoryLimitError as error:
        count = host.gpu.count if host.gpu else 1
        if count <= mesh_of(config).ranks:
            return str(error)
        return f"{error}; set tensor_parallel_size to {count} to share it between {count} GPUs"
    return ""
