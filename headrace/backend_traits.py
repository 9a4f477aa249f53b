"""Traits of the backends: a record for each, that can be read without importing the backend."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from headrace.errors import RequestError
from headrace.record import frozen

BackendName = Literal["auto", "cpu", "cuda", "reference"]
KvDtype = Literal["bf16", "f16", "f32", "fp8", "int8", "int4", "k8v4"]
KvChoice = Literal["auto", "bf16", "f16", "f32", "fp8", "int8", "int4", "k8v4"]
"""A number format of KV, or `auto`, which the loader replaces by the model's."""


@frozen(kw_only=True)
class BackendTraits:
    """Abilities of a backend, and its defaults for the size of a step."""

    kv_dtypes: tuple[KvDtype, ...]
    kv_block_size: int = 32
    """Tokens in a block of KV."""
    on_gpu: bool = False
    """Whether weights and KV are in the memory of a GPU, with torch and Triton in the process."""
    has_top_blocks: bool = False
    """Whether attention can choose blocks of KV (`EngineConfig.attention_top_blocks`)."""
    packs_drafters: bool = False
    """Whether `draft_format` packs the matrices of drafters."""
    shares_tensors: bool = False
    """Whether programs with KV of their own share packed tensors (`Executable.attach`)."""
    gives_kv_blocks: bool = False
    """Whether KV blocks can be copied to files and back (`EngineConfig.kv_cache_dir`)."""
    has_ranks: bool = False
    """Whether several processes can share a model."""
    max_num_seqs: int = 64
    """Default of `EngineConfig.max_num_seqs`."""
    max_num_batched_tokens: int = 512
    """Default of `EngineConfig.max_num_batched_tokens`."""
    chunked_prefill_size: int = 16
    """Default of `EngineConfig.chunked_prefill_size`."""
    max_in_flight: int = 1
    """Max launches of one device before the first result is waited for."""


BACKENDS: Mapping[str, BackendTraits] = MappingProxyType(
    {
        "cpu": BackendTraits(
            kv_dtypes=("bf16", "f16", "f32", "int8", "int4", "k8v4"),
            has_top_blocks=True,
            packs_drafters=True,
            shares_tensors=True,
            gives_kv_blocks=True,
            has_ranks=True,
        ),
        "cuda": BackendTraits(
            kv_dtypes=("bf16", "f16", "f32", "fp8", "int8"),
            kv_block_size=64,
            on_gpu=True,
            has_ranks=True,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            chunked_prefill_size=256,
            max_in_flight=2,
        ),
        "reference": BackendTraits(kv_dtypes=get_args(KvDtype), has_top_blocks=True),
    }
)


def traits_of(backend: str) -> BackendTraits:
    """Traits of a backend. `auto` has the traits of `cpu` until the loader chooses a backend.

    Raises RequestError if no backend has the name.
    """
    name = "cpu" if backend == "auto" else backend
    if name not in BACKENDS:
        raise RequestError(f"unknown backend '{backend}'; choose from: {', '.join(BACKENDS)}")
    return BACKENDS[name]


def check_kv_dtype(backend: str, dtype: KvDtype) -> None:
    """Raise RequestError if the backend cannot keep KV in this number format."""
    supported = traits_of(backend).kv_dtypes
    if dtype not in supported:
        choices = f"{', '.join(supported[:-1])} or {supported[-1]}"
        raise RequestError(f"kv_dtype '{dtype}' is not supported on {backend}; choose {choices}")


def check_top_blocks(backend: str, option: str, top_blocks: int) -> None:
    """Raise RequestError if attention shall choose blocks of KV, and the backend cannot."""
    if top_blocks and not traits_of(backend).has_top_blocks:
        raise RequestError(
            f"{option} {top_blocks:,} is not supported on {backend}; choose backend cpu, or set "
            f"{option} to 0"
        )
