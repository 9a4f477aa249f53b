"""The specification of a model."""

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Literal

from headrace.program.ops import Activation, NormKind
from headrace.record import frozen

_MAX_LAYERS = 1 << 16


def layer_range(num_layers: int) -> range:
    """Layers by number, limited because a file may claim any number."""
    return range(min(num_layers, _MAX_LAYERS))


@frozen
class RopeSpec:
    """Rotary position embedding (Su et al. 2021)."""

    dim: int
    theta: float = 10000.0
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    """`linear` (Chen et al. 2023), `dynamic` (NTK-aware), `llama3` (Llama 3.1), `yarn` (Peng et
    al. 2023) or `longrope` (Ding et al. 2024).
    """
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
    """Divisors of the frequencies; with `longrope`, for short contexts."""
    long_factors: tuple[float, ...] = ()
    """Divisors for contexts beyond `original_context`."""


@frozen
class ExpertSpec:
    """A mixture of experts in place of the MLP (`moe.Route`)."""

    num_experts: int
    top_k: int
    ffn_dim: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    choice_bias: bool = False
    """Whether the choice adds a bias to scores."""
    shared_ffn_dim: int = 0
    """Width of the expert of all rows; 0: none."""
    shared_gate: bool = False
    """Whether it has a sigmoid gate per row."""
    router_bias: bool = False
    bias: bool = False
    dense_layers: tuple[int, ...] = ()


@frozen
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024).

    Keys and values are products with one latent row; keys share a rotated part. The plain form
    stores both for each head. If `is_absorbed`, the KV is the latent row and the rotated part: 9
    to 71 times smaller, with three times the arithmetic and other roundings.
    """

    kv_rank: int
    """Size of the latent row."""
    value_dim: int
    """Size of the value of a head."""
    query_rank: int = 0
    """Size of the latent row of queries; 0: none."""
    norm_eps: float = 1e-6
    is_half_split: bool = False
    """Whether stored rotary pairs are half-split."""
    is_absorbed: bool = False


@frozen
class EarlyExit:
    """An exit after the first layers for rows whose next token is clear there (`ExitChoice`)."""

    num_layers: int
    min_margin: float
    """Min difference of the two largest probabilities."""

    @property
    def map_name(self) -> str:
        """Name of the matrix before the head, if the model's tensors have one."""
        return exit_map_name(self.num_layers)


def exit_map_name(num_layers: int) -> str:
    return f"exit.{num_layers}.map"


@frozen
class DrafterSpec:
    """A drafter over rows of the model that it drafts for, its target."""

    taps: tuple[int, ...]
    """Layers of the target before which it takes rows."""
    target_dim: int
    """Width of these rows."""
    vocab_size: int
    """Tokens that it can draft."""
    norm_before_residual: bool = False
    """Whether the residual stream starts with the norm of the rows."""
    embedding_in_residual: bool = False
    """Whether the residual stream starts with a matrix of the token's embedding and the rows."""
    fuse_bias: bool = False
    """Whether the matrix that joins rows has a bias."""
    row_first: bool = False
    """Whether that matrix joins the row with the token, or else the token with the row."""
    drafts_from_normed: bool = False
    """Whether further drafts read rows after the last norm."""


@frozen
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
    rope: RopeSpec | None = None
    name: str = ""
    context: int = 0
    """Max tokens of a sequence, which selects rotary factors; 0: `max_context`."""

    windows: tuple[int, ...] = ()
    """Sliding window of each layer, with the row itself; 0: none."""
    window_rope: RopeSpec | None = None
    """Rotary embedding of layers with a window, if it differs."""
    rotated: tuple[bool, ...] = ()
    """Whether each layer rotates; empty: all."""
    alibi_bias: float = 0.0
    """Exponent of the steepest slope; 0: no ALiBi."""
    learned_positions: int = 0

    norm: NormKind = "rms"
    norm_bias: bool = False
    qk_norm: Literal["none", "head", "heads", "row"] = "none"
    """Norm of queries and keys: by `head` with a shared weight, `heads` with a weight each, or
    `row`.
    """
    activation: Activation = "silu"
    squares_activation: bool = False
    """Whether an MLP without a gate squares its activation (squared ReLU, So et al. 2021)."""
    gated_mlp: bool = True
    tied_embeddings: bool = False
    has_head: bool = True
    """False: the file has no head and no tie, so the model only computes embeddings. The program
    still multiplies with the embedding.
    """
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    sinks: bool = False

    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    """Factor of scores; 0: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    residual_scale: float = 1.0
    """Factor of results that are added to the residual stream."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    experts: ExpertSpec | None = None
    mla: MlaSpec | None = None
    """`head_dim` then is the size of a query."""
    embedding_norm: bool = False
    block: Literal["sequential", "parallel", "parallel_two_norms"] = "sequential"
    """Block of each layer, in families with several (`by_spec`)."""
    early_exit: EarlyExit | None = None
    drafter: DrafterSpec | None = field(default=None, repr=False)
    """Set for a drafter alone; fingerprints of models do not have it."""
    keeps_rows: bool = field(default=False, repr=False)
    """Whether the last layer computes all rows, for a drafter, and not only those with logits."""
    layers: tuple[int, ...] = ()
    """Layers that the program has, in a shortened model; empty: all."""

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> RopeSpec | None:
        if self.rotated and not self.rotated[layer]:
            return None
        return self.window_rope if self.window_rope and self.window(layer) else self.rope

    def with_layers(self, layers: Sequence[int]) -> "ModelSpec":
        """The model with these layers alone, under their numbers. They ascend."""
        return replace(self, layers=tuple(layers))

    @property
    def used_layers(self) -> Sequence[int]:
        return self.layers or range(self.num_layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return tuple(rope for rope in (self.rope, self.window_rope) if rope)

    @property
    def rotary_dim(self) -> int:
        return self.rope.dim if self.rope else 0
