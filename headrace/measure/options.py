"""Engine options of measurements."""

from typing import TypedDict

from headrace.backend_traits import BackendName, KvDtype
from headrace.config import Activations


class EngineOptions(TypedDict, total=False):
    """Fields of `EngineConfig` that change the speed; each keeps its default there."""

    backend: BackendName
    threads: int
    kv_dtype: KvDtype
    activations: Activations
    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_layers: tuple[int, ...]
    enable_expert_parallel: bool
    enable_sequence_parallel: bool
