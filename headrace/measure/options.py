"""Engine options that measurements take as keyword arguments."""

from typing import TypedDict

from headrace.backend_traits import BackendName, KvDtype
from headrace.config import Activations


class EngineOptions(TypedDict, total=False):
    """Fields of `EngineConfig` that change how fast a model runs; each keeps its default there."""

    backend: BackendName
    threads: int
    kv_dtype: KvDtype
    activations: Activations
    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_layers: tuple[int, ...]
    enable_expert_parallel: bool
    enable_sequence_parallel: bool
