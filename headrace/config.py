"""Configuration records: small, frozen, typed. Every field has a default, and each face of Headrace
says which it changes, and why.
"""

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any, Literal

from headrace.backend_traits import BackendName, BackendTraits, KvDtype, traits_of
from headrace.record import frozen

Activations = Literal["int8", "f32"]
LatentAttention = Literal["plain", "absorbed"]
AcceptanceMethod = Literal["exact", "rejection", "typical"]


@frozen
class KvConfig:
    """Size and number format of the KV cache that an executable holds."""

    num_blocks: tuple[int, ...] = (64,)
    """Blocks of each group of layers that keep alike, shared by all sequences."""
    block_size: int = 32
    """Token slots in a block."""
    dtype: KvDtype = "bf16"
    """Number format of keys and values: fp8, int8 and int4 have a scale for each token and head."""


@frozen
class EngineConfig:
    """How the engine schedules, independent of model and backend."""

    backend: BackendName = "auto"
    """`cpu` (C++ kernels), `cuda` (Triton kernels on a GPU) or `reference` (NumPy, the truth in
    tests); `auto`: the GPU, where there is one of compute capability 8.0 or more, with the packages
    of the extra `cuda`, and the model fits in its memory, else the CPU.
    """
    threads: int = 0
    """Compute threads of each process; 0: one for each physical core that it may use, shared evenly
    where there are several.
    """
    tensor_parallel_size: int = 1
    """Processes that share each matrix of the model, and its KV heads. Never changes a token."""
    pipeline_parallel_size: int = 1
    """Stages that the layers are cut into, each of `tensor_parallel_size` processes. Never changes
    a token.
    """
    pipeline_layers: tuple[int, ...] = ()
    """Layers of each stage, for machines that are not alike; none: stages that read as much as each
    other in a step of one row.
    """
    enable_expert_parallel: bool = True
    """Whether each of the processes that share a layer has some of its experts, or all of them."""
    enable_sequence_parallel: bool = False
    """Whether the processes that share a layer split what layers add up by columns and norm some of
    the rows each, which takes less work and memory of each and one exchange more. Never changes a
    token.
    """
    kv_dtype: KvDtype = "bf16"
    """Number format of keys and values."""
    activations: Activations = "int8"
    """What quantised weights are multiplied with: int8 by group of 32 columns, or float32, exact
    and slower. Weights in int8 by row have int8 activations by row either way. A GPU multiplies
    weights in all other formats with bf16 where this is `int8`.
    """
    latent_attention: LatentAttention = "plain"
    """Form of attention by latent rows, in models that have it (DeepSeek). `plain` keeps a key and
    a value for each head; `absorbed` keeps the latent row, a ninth of that for 16 heads, and
    computes three times as much. Their roundings differ, so tokens may.
    """
    kv_blocks: int = 0
    """Blocks of KV for the layers that see furthest; 0: as many as `max_num_seqs` sequences of full
    length need, within half of the memory that is left. Layers with a narrower window have as many
    blocks of their own as the sequences in these can need.
    """
    kv_offload_bytes: int = 0
    """Bytes of the host's memory for what the prefix cache of a GPU has no blocks for any more,
    pinned as they are needed; it is copied back where that is quicker than to compute it again. 0:
    none. Never changes a token. KV on a CPU is there anyway.
    """
    max_model_len: int = 0
    """Tokens of the longest sequence, prompt and output; 0: the context that the model was trained
    for.
    """
    attention_window: int = 0
    """Lossy, for models that were not trained with a window: every layer without one of its own
    sees the first `attention_sinks` tokens and the last so many alone, and keeps no more KV than
    that. 0: layers see what the model says.
    """
    attention_sinks: int = 4
    """First tokens that all rows see beside an `attention_window`: without them a model falls apart
    (Xiao et al. 2023).
    """
    batching: Literal["inflight", "static"] = "inflight"
    """`inflight`: requests join and leave at every step. `static`: a batch starts and ends
    together, the baseline to compare with.
    """
    max_num_seqs: int | None = None
    """Most sequences in one step. None: 64, and 256 on a GPU (`max_seqs`)."""
    max_num_batched_tokens: int | None = None
    """Row budget of a step: decode rows first, then prompt chunks. None: 512, and 2,048 on a GPU
    (`max_rows`).
    """
    chunked_prefill_size: int | None = None
    """Prompt rows in a step that also decodes, beside one row for each decoding sequence; deep in a
    context fewer, as attention costs more there. 16, on a CPU, lets a long prompt stretch the time
    between tokens of other requests to about three times; large values favour throughput. 0: as
    many as `max_num_batched_tokens`. None: 16, and 256 on a GPU (`max_chunk_rows`).
    """
    max_logit_rows: int = 0
    """Most rows with logits in one step, beyond one for each sequence, for prompt log-probabilities
    and drafts, which all sequences of a step share: it bounds the memory that logits take. 0: as
    many as fit in 64 MiB, and 64 at least.
    """
    multi_step_ms: float = 10
    """Milliseconds for which steps of plain decoding are run in a row; their tokens are handed out
    after the last of them. A new request ends them with the step that runs. 0: one step at a time.
    Never changes a token.
    """
    proposer: Literal[
        "off",
        "auto",
        "ngram",
        "jacobi",
        "lookahead",
        "online",
        "draft_model",
        "self_draft",
        "medusa",
    ] = "off"
    """Where drafts come from; `auto`: from the n-gram index, the online table, and those of the
    last three that are configured. Never changes a token, unless `acceptance_method` says so.
    """
    max_draft_tokens: int = 16
    """Most draft tokens of a sequence in a step."""
    adaptive_speculation: bool = True
    """Draft as much as saves time by measured acceptance and step times, down to nothing; False: as
    much as fits into the step.
    """
    draft_model: str = ""
    """For `draft_model`: a smaller model with the same vocabulary, named as models are."""
    draft_layers: int = 0
    """For `self_draft`: how many of the model's first layers draft; `headrace calibrate` suggests a
    number.
    """
    medusa_heads: str = ""
    """For `medusa`: a safetensors file with heads that were trained for the model."""
    draft_depth: int = 4
    """Most draft tokens one after the other, of the three proposers above."""
    draft_width: int = 1
    """Draft tokens at each depth: 1 makes chains, more make trees of the draft model's likeliest
    tokens.
    """
    jump_forward: bool = True
    """Take tokens that are certain, as a grammar allows no other, several in a step, up to
    `max_draft_tokens`. Never changes a token.
    """
    acceptance_method: AcceptanceMethod = "exact"
    """How drafts are verified. `exact`: the tokens are those of plain decoding. `rejection`:
    textbook rejection sampling, the same distribution. `typical`: lossy.
    """
    prefix_cache: bool = True
    """Keep the KV of past and running requests, while there is room, for requests that begin alike;
    never changes a token.
    """
    target_token_ms: float = 0
    """Milliseconds of a step beyond which waiting requests are not admitted; 0: no such limit."""
    queue_timeout: float = 0
    """Seconds that a request may wait for its first step, after which it ends as one whose own time
    is up; 0: no limit.
    """
    seed: int = 0
    """Seed of the requests that bring none of their own."""

    @property
    def traits(self) -> BackendTraits:
        return traits_of(self.backend)

    @property
    def max_seqs(self) -> int:
        """Sequences in one step at most."""
        return self.max_num_seqs or self.traits.max_num_seqs

    @property
    def max_rows(self) -> int:
        """Rows of a step at most."""
        return self.max_num_batched_tokens or self.traits.max_num_batched_tokens

    @property
    def max_chunk_rows(self) -> int:
        """Prompt rows in a step that also decodes, beside one row for each decoding sequence, at
        most.
        """
        if self.chunked_prefill_size is None:
            return min(self.max_rows, self.traits.chunked_prefill_size)
        return self.chunked_prefill_size or self.max_rows

    @property
    def shown(self) -> dict[str, Any]:
        """What `headrace top` shows of it, fit for JSON."""
        names = ("backend", "threads", "kv_dtype", "batching", "proposer")
        most = {"max_num_seqs": self.max_seqs, "max_num_batched_tokens": self.max_rows}
        return {name: getattr(self, name) for name in names} | most

    @property
    def lossy(self) -> str:
        """What keeps the model from being itself, in words; empty where nothing does."""
        if not self.attention_window:
            return ""
        sinks = f"the first {self.attention_sinks:,} tokens and " if self.attention_sinks else ""
        return f"sees {sinks}the last {self.attention_window:,} alone"


@frozen
class FaceDefaults:
    """What a face of Headrace sets unless its user says otherwise; for all else the records' own
    defaults hold.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    """By field of `EngineConfig`."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """By field of `SamplingParams`."""


SERVING = FaceDefaults()
"""Many callers, each reading tokens as they come: the records' own defaults are made for these."""

OFFLINE = FaceDefaults(
    engine=MappingProxyType(
        {
            # Whole results come soonest with large chunks, and no reader watches the time between
            # two tokens.
            "chunked_prefill_size": 0,
            # Fewer and longer calls take less time in all, and a text that is streamed still flows
            # at 20 pieces a second.
            "multi_step_ms": 50.0,
        }
    )
)
"""`LLM` and `headrace bench`: one program waits for whole results."""

INTERACTIVE = FaceDefaults(
    engine=MappingProxyType(
        {
            # One person asks one question at a time, so the KV pool is for one sequence (or the
            # beams of one search).
            "max_num_seqs": 1,
            # A sequence alone leaves arithmetic idle that can check drafts. Answers often quote;
            # where they do not, drafting rests.
            "proposer": "auto",
        }
    ),
    sampling=MappingProxyType(
        {
            # Small models fall into loops. A low temperature without the unlikely tail, and a
            # penalty that does not grow, keep them out: of 24 answers of the default model 4 looped
            # without the penalty, none with it. Prompts are not penalised.
            "temperature": 0.3,
            "min_p": 0.05,
            "presence_penalty": 1.0,
            # The same question has the same answer every time.
            "seed": 0,
            # An answer ends where the model ends it, or with the context.
            "max_tokens": None,
        }
    ),
)
"""`headrace run`: one person reads along. `LLM.chat` has its sampling, too."""
