"""Engine options of measurements."""

from typing import TypedDict

from headrace.backend_traits import BackendName, KvChoice
from headrace.config import Activations, RopeScaling


class ModeOptions(TypedDict, total=False):
    """Fields of `EngineConfig` that make a lossy mode (`LOSSY_OPTIONS`)."""

    attention_window: int
    attention_sinks: int
    attention_top_blocks: int
    early_exit: str
    activation_sparsity: str


class ModelOptions(ModeOptions, total=False):
    """Fields of `EngineConfig` that change the model; each keeps its default there."""

    backend: BackendName
    threads: int
    kv_dtype: KvChoice
    activations: Activations
    rope_scaling: RopeScaling | None
    rope_scale: float
    rope_theta: float
    yarn_orig_ctx: int


class EngineOptions(ModelOptions, total=False):
    """Fields of `EngineConfig` that change the speed or the model."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_layers: tuple[int, ...]
    enable_expert_parallel: bool
    enable_sequence_parallel: bool
