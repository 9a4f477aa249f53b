"""What a checkpoint says of its model, in one record; the equations and the planner read nothing
else.
"""

from dataclasses import replace
from typing import Literal

from headrace.program.ops import Activation, NormKind
from headrace.record import frozen


@frozen
class RopeSpec:
    """Rotary position embedding.

    `scaling` is the published rule that stretches the frequencies: `linear` (Chen et al. 2023),
    `dynamic` (NTK-aware), `llama3` (Llama 3.1), `yarn` (Peng et al. 2023) or `longrope` (Ding et
    al. 2024). `factors`, where a file carries its own, divides the frequencies one by one; of
    longrope's they are those up to the original context, and `long_factors` those beyond.
    """

    dim: int
    theta: float = 10000.0
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
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
    long_factors: tuple[float, ...] = ()


@frozen
class ExpertSpec:
    """A mixture of experts in the place of an MLP; `moe.Route` says what the fields of the
    choice mean.
    """

    num_experts: int
    top_k: int
    ffn_dim: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    choice_bias: bool = False
    """Whether the choice, and nothing else, adds a bias to the scores."""
    shared_ffn_dim: int = 0
    """Width of a further unit that all rows go through; 0: there is none."""
    shared_gate: bool = False
    """Whether its result is multiplied with the sigmoid of a product with the row."""
    router_bias: bool = False
    bias: bool = False
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain MLP all the same."""


@frozen
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are products
    with one latent row for each token.

    The rotated numbers of a query or key, as many as the rotary embedding has dimensions, come
    beside the others of its head, and those of keys are one part that all heads share. What a layer
    keeps of a token, and so the rounding of every number, depends on the form:

    * plain: a key and a value for each head;
    * `is_absorbed`: the latent row with the rotated part. It is the key and, without that part, the
      value of all heads; queries are multiplied with what would have made keys of it, and what
      attention gives with what would have made values of it. This KV is 9 to 71 times smaller, and
      attention has three times the arithmetic.
    """

    kv_rank: int
    """Numbers of a latent row."""
    value_dim: int
    """Numbers of a head that attention gives to the output matrix."""
    query_rank: int = 0
    """Numbers of a row that queries are made of; 0: they are made of the layer's input itself."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of those rows."""
    is_half_split: bool = False
    """Whether the file has rotary pairs half-split."""
    is_absorbed: bool = False


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
    """None: positions come in otherwise."""
    name: str = ""
    """What the model is called, for people; it comes from where its files are opened."""
    context: int = 0
    """Most tokens of a sequence, where the engine is made for fewer than `max_context`; it decides
    which rotary factors apply.
    """

    windows: tuple[int, ...] = ()
    """Sliding window of each layer (0: none): a row sees itself and the `window - 1` positions
    before it.
    """
    window_rope: RopeSpec | None = None
    """Rotary embedding of layers with a window, where it is another."""
    rotated: tuple[bool, ...] = ()
    """Whether each layer rotates its queries and keys, where not all do."""
    alibi_bias: float = 0.0
    """Exponent of ALiBi's steepest slope (Press et al. 2022), mostly 8; 0: there are no slopes."""
    learned_positions: int = 0
    """Positions that have an embedding of their own, which is added to that of the token."""

    norm: NormKind = "rms"
    norm_bias: bool = False
    qk_norm: Literal["none", "head", "heads", "row"] = "none"
    """Over what queries and keys are normalised: each head by a weight that all share, each by one
    of its own, or all at once.
    """
    activation: Activation = "silu"
    gated_mlp: bool = True
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    sinks: bool = False
    """Whether each head has a score that belongs to no key (gpt-oss)."""

    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    """Factor of attention scores; 0: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    residual_scale: float = 1.0
    """Factor of what a block adds to the rows."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    experts: ExpertSpec | None = None
    mla: MlaSpec | None = None
    """Attention by latent rows; a query then has `head_dim` numbers, those that are rotated
    included.
    """
    embedding_norm: bool = False
    block: Literal["sequential", "parallel", "parallel_two_norms"] = "sequential"
    """Which of the blocks of `model/decoder.py` the layers are, in a family that has several."""

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> RopeSpec | None:
        """The rotary embedding of a layer; None where it has none."""
        if self.rotated and not self.rotated[layer]:
            return None
        return self.window_rope if self.window_rope and self.window(layer) else self.rope

    def first_layers(self, num_layers: int) -> "ModelSpec":
        """The same model with so many layers."""
        return replace(
            self,
            num_layers=num_layers,
            windows=self.windows[:num_layers],
            rotated=self.rotated[:num_layers],
        )

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """All rotary embeddings."""
        return tuple(rope for rope in (self.rope, self.window_rope) if rope)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated, the same in all layers that rotate any."""
        return self.rope.dim if self.rope else 0
