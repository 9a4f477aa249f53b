"""The choice of a backend, on simulated machines."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.backend import lower_program
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.errors import MemoryLimitError, RequestError, UnsupportedModelError
from headrace.loader import backend_choice as choices
from headrace.loader import memory
from headrace.loader.backend_choice import choose_backend, with_backend
from headrace.loader.kv_size import Memory
from headrace.loader.load import open_model
from headrace.loader.options import engine_config
from headrace.model import trace_model
from headrace.planner.gpu import Gpu, GpuHost
from tests.checkpoint.conftest import write_gguf  # noqa: F401 - a fixture
from tests.tables import random_table

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000, 132, (12, 8))
READY = GpuHost(H100, torch_cuda="12.8")
NONE = GpuHost(no_gpu="there is no NVIDIA driver on this machine: use the cpu backend")


@pytest.fixture
def checkpoint(write_gguf: Any) -> Checkpoint:  # noqa: F811
    path: Path = write_gguf()
    return open_model(str(path), EngineConfig())


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that simulates a machine with free bytes on each of its GPUs."""

    def make(host: GpuHost, *free: int) -> None:
        free_of = free or (10**11,) * (host.gpu.count if host.gpu else 1)
        monkeypatch.setattr("headrace.planner.gpu.find_gpu_host", lambda: host)
        monkeypatch.setattr(
            memory,
            "memory_for",
            lambda config, program, gpu=0: Memory(
                free_of[gpu], 10**9, on_gpu=config.backend == "cuda"
            ),
        )

    return make


def chosen(checkpoint: Checkpoint, **options: Any) -> tuple[str, str]:
    return tuple(choose_backend(engine_config(options), checkpoint))


def test_backend_auto_is_the_default(on: Callable[..., None], checkpoint: Checkpoint) -> None:
    on(READY)
    assert EngineConfig().backend == "auto" and chosen(checkpoint) == ("cuda", "")
    chosen_config = replace(EngineConfig(), backend="cuda", kv_dtype="bf16")
    assert with_backend(EngineConfig(), checkpoint) == chosen_config


@pytest.mark.parametrize("options", [{"backend": "cpu"}, {"backend": "reference"}, {}])
def test_backend_without_a_gpu_logs_nothing(
    options: dict[str, Any],
    on: Callable[..., None],
    checkpoint: Checkpoint,
    caplog: pytest.LogCaptureFixture,
) -> None:
    on(NONE)
    assert chosen(checkpoint, **options) == (options.get("backend", "cpu"), "")
    with_backend(engine_config(options), checkpoint)
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "options", "why"),
    [
        (
            {"absent": ("torch", "triton")},
            {},
            "torch and triton are not installed: pip install 'headrace[cuda]', about 3 GB",
        ),
        ({"gpu": replace(H100, capability=(7, 5))}, {}, "compute capability 7.5"),
        ({"torch_cuda": None}, {}, "torch is a CPU build"),
        ({"interprets": True}, {}, "TRITON_INTERPRET is set"),
        (
            {},
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "tensor_parallel_size x pipeline_parallel_size is 4 ranks on this machine, which has "
            "1 GPU: lower these sizes to 1, or choose backend cpu",
        ),
        ({}, {"kv_dtype": "int4"}, "kv_dtype 'int4' is not supported on cuda"),
    ],
)
def test_unused_gpu_is_logged_in_one_line(
    change: dict[str, Any],
    options: dict[str, Any],
    why: str,
    on: Callable[..., None],
    checkpoint: Checkpoint,
    caplog: pytest.LogCaptureFixture,
) -> None:
    on(replace(READY, **change))
    backend, remark = chosen(checkpoint, **options)
    assert (
        backend == "cpu"
        and remark.startswith("the GPU is not used: ")
        and why in remark
        and "\n" not in remark
    )
    with caplog.at_level(logging.WARNING):
        assert with_backend(engine_config(options), checkpoint).backend == "cpu"
    assert [record.getMessage() for record in caplog.records] == [remark]


def test_model_too_large_for_the_gpu_runs_on_the_cpu(
    on: Callable[..., None], checkpoint: Checkpoint
) -> None:
    weights = lower_program(
        "cuda", trace_model(checkpoint.spec, checkpoint.tensors), checkpoint.tensors
    ).weight_bytes
    on(READY, 10**9 + weights)
    backend, remark = chosen(checkpoint)
    assert (
        backend == "cpu"
        and f"{weights:,} bytes of weights" in remark
        and "are free on the GPU; the model is too large for this GPU" in remark
    )
    on(replace(READY, gpu=replace(H100, count=2)), 10**9 + weights, 10**11)
    assert chosen(checkpoint)[1] == (
        f"{remark}; set tensor_parallel_size to 2 to share it between 2 GPUs"
    )
    on(READY, 10**9 + weights + 10**6)
    assert chosen(checkpoint) == ("cuda", "")
    with pytest.raises(MemoryLimitError, match="free on the GPU; set max_model_len to"):
        memory.fit_memory(
            replace(EngineConfig(), backend="cuda", max_model_len=2**20),
            checkpoint,
            trace_model(checkpoint.spec, checkpoint.tensors),
            choices.DraftCheckpoints(),
            2**20,
        )


def test_each_rank_has_a_gpu(on: Callable[..., None], checkpoint: Checkpoint) -> None:
    """The rank with the least room decides how many blocks of KV all ranks have."""
    two_gpus = replace(READY, gpu=replace(H100, count=2))
    sizes = {"tensor_parallel_size": 2, "max_num_seqs": 60_000}
    on(two_gpus)
    assert chosen(checkpoint, **sizes) == ("cuda", "")
    on(READY)
    with pytest.raises(
        RequestError,
        match=r"^backend 'cuda' cannot run here: tensor_parallel_size x pipeline_parallel_size "
        "is 2 ranks on this machine, which has 1 GPU: lower these sizes to 1, or choose "
        "backend cpu$",
    ):
        chosen(checkpoint, backend="cuda", **sizes)

    config = replace(engine_config({"backend": "cuda", **sizes}), kv_dtype="bf16")
    program = trace_model(checkpoint.spec, checkpoint.tensors)

    def blocks(*free: int) -> int:
        on(two_gpus, *free)
        kv, _, _ = memory.fit_memory(config, checkpoint, program, choices.DraftCheckpoints(), 64)
        return kv.num_blocks[0]

    much, little = 2 * 10**9, 10**9 + 10**8
    assert blocks(much, much) > blocks(little, little) > 1
    uneven = (blocks(much, little), blocks(little, much))  # ranks have other weights
    assert min(uneven) == blocks(little, little) and max(uneven) < blocks(much, much)


A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 85_000_000_000, 108, (12, 8))


def test_gpu_without_fp8(on: Callable[..., None], checkpoint: Checkpoint) -> None:
    """KV and weights in fp8 are refused by name; `auto` takes the CPU for weights in fp8."""
    why = "NVIDIA A100-SXM4-80GB has compute capability 8.0, and fp8 needs 8.9"
    name = next(name for name, tensor in checkpoint.tensors.items() if tensor.rows > 1)
    matrix = checkpoint.tensors[name]
    fp8 = random_table("e4m3", matrix.rows, matrix.cols, seed=0, name=name)
    quantised = replace(checkpoint, tensors={**checkpoint.tensors, name: fp8})

    on(replace(READY, gpu=A100))
    cuda = engine_config({"backend": "cuda"})
    with pytest.raises(RequestError, match=f"^kv_dtype 'fp8' is not supported: {why}; choose bf16"):
        with_backend(replace(cuda, kv_dtype="fp8"), checkpoint)
    with pytest.raises(UnsupportedModelError, match=f"^tensor '{name}' is fp8: {why}; choose"):
        with_backend(cuda, quantised)
    assert chosen(checkpoint) == chosen(checkpoint, kv_dtype="int8") == ("cuda", "")
    backend, remark = chosen(quantised)
    assert backend == "cpu" and why in remark

    on(READY)
    assert with_backend(replace(cuda, kv_dtype="fp8"), quantised).backend == "cuda"


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_context_shrinks_to_the_memory_of_the_gpu(
    backend: str,
    on: Callable[..., None],
    checkpoint: Checkpoint,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The model has a context of 2**20 tokens."""
    checkpoint = replace(checkpoint, spec=replace(checkpoint.spec, max_context=2**20))
    program = lower_program(
        "cuda", trace_model(checkpoint.spec, checkpoint.tensors), checkpoint.tensors
    )
    (group,) = program.kv_groups
    per_token = group.block_bytes("bf16", 64) // 64

    def config(tokens: int, **options: Any) -> EngineConfig:
        on(READY, 10**9 + program.weight_bytes + tokens * per_token)
        return with_backend(engine_config({"backend": backend, **options}), checkpoint)

    assert config(2**20).max_model_len == 0 and not caplog.records
    for tokens in (2**20 - 1024, 5000, 1024):
        fitting = config(tokens)
        assert fitting.backend == "cuda" and fitting.max_model_len == tokens // 64 * 64
        assert (
            f"max_model_len is {tokens // 64 * 64:,}, because the GPU has no memory" in caplog.text
        )
        memory.fit_memory(
            fitting, checkpoint, program, choices.DraftCheckpoints(), fitting.max_model_len
        )
        caplog.clear()
    assert config(1000).max_model_len == 0
    assert config(5000, max_model_len=6000).max_model_len == 6000  # which is refused later
    assert config(5000, max_model_len=6000).backend == ("cpu" if backend == "auto" else "cuda")


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (
            NONE,
            "backend 'cuda' cannot run here: there is no NVIDIA driver on this machine: "
            "use the cpu backend",
        ),
        (
            replace(READY, gpu=None, no_gpu="the NVIDIA driver shows no GPU"),
            "the NVIDIA driver shows no GPU",
        ),
        (replace(READY, gpu=replace(H100, capability=(6, 1))), "kernels need at least 8.0"),
        (
            replace(READY, absent=("torch",)),
            "torch is not installed: pip install 'headrace[cuda]', about 3 GB",
        ),
        (replace(READY, torch_cuda=None), "torch is a CPU build"),
        (
            replace(NONE, interprets=True, absent=("triton",)),
            "backend 'cuda' needs triton; pip install 'headrace[cuda]'",
        ),
    ],
)
def test_named_gpu_backend_that_cannot_run_raises(
    host: GpuHost, message: str, on: Callable[..., None], checkpoint: Checkpoint
) -> None:
    on(host)
    with pytest.raises(RequestError) as error:
        chosen(checkpoint, backend="cuda")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_named_gpu_backend(on: Callable[..., None], checkpoint: Checkpoint) -> None:
    """A model that does not fit raises MemoryLimitError later, in `fit_memory`."""
    on(READY, 0)
    assert chosen(checkpoint, backend="cuda") == ("cuda", "")
    on(replace(NONE, interprets=True))
    backend, remark = chosen(checkpoint, backend="cuda")
    assert backend == "cuda" and "interpreted" in remark
    with pytest.raises(RequestError, match="kv_dtype 'int4' is not supported on"):
        with_backend(engine_config({"backend": "cuda", "kv_dtype": "int4"}), checkpoint)
