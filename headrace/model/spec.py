"""What a checkpoint says of its model, in one record; the equations and the planner read nothing else."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding.

    `scaling` is the published rule that stretches the frequencies: `linear` (Chen et al. 2023), `llama3` (Llama 3.1) or
    `yarn` (Peng et al. 2023). `factors`, where a file carries its own, divides the frequencies one by one.
    """

    dim: int
    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """Shape and constants of a decoder."""

    architecture: str
    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope: RopeSpec
    name: str = ""
    """What the model is called, for people; it comes from where its files are opened."""
    windows: tuple[int, ...] = ()
    """Sliding window of each layer (0: none): a row sees itself and the `window - 1` positions before it."""
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0
