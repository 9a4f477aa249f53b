"""Configuration records: small, frozen, typed. Every field has a default."""

from dataclasses import dataclass
from typing import Literal

KvDtype = Literal["bf16", "f32", "int8", "int4"]
AcceptanceMethod = Literal["exact", "rejection", "typical"]


@dataclass(frozen=True)
class KvConfig:
    """Size and number format of the KV cache that an executable holds."""

    num_blocks: tuple[int, ...] = (64,)
    """Blocks of each group of layers that keep alike, shared by all sequences."""
    block_size: int = 32
    """Token slots in a block."""
    dtype: KvDtype = "bf16"
    """Number format of keys and values: int8 and int4 have a scale for each token and head."""


@dataclass(frozen=True)
class EngineConfig:
    """How the engine schedules, independent of model and backend."""

    backend: str = "cpu"
    """`cpu` (C++ kernels) or `reference` (NumPy, the truth in tests)."""
    threads: int = 0
    """Compute threads; 0: as many as the process may use."""
    kv_dtype: KvDtype = "bf16"
    """Number format of keys and values."""
    kv_blocks: int = 0
    """Blocks of KV for the layers that see furthest; 0: from the context length and the memory at hand. Layers with a narrower window
    have as many of their own as the sequences in these blocks can need, and no more."""
    max_model_len: int = 0
    """Longest sequence, prompt and output; 0: what the model was trained for."""
    batching: Literal["inflight", "static"] = "inflight"
    """`inflight`: requests join and leave at every step. `static`: a batch starts and ends together, the baseline to compare with."""
    max_num_seqs: int = 64
    """Most sequences in one step."""
    max_num_batched_tokens: int = 512
    """Row budget of a step: decode rows first, then prompt chunks."""
    chunked_prefill_size: int = 16
    """Rows for prompts in a step that also decodes, beside one for each decoding sequence; deep in a context fewer, as attention costs
    more there. So a long prompt stretches the time between tokens of others to about three times. Large values
    favour throughput: `LLM` sets it to `max_num_batched_tokens` unless told otherwise."""
    max_logit_rows: int = 64
    """Most rows of one sequence with logits in one step (prompt log-probabilities are computed in chunks of this size)."""
    multi_step_ms: float = 10
    """Steps of plain decoding are run in a row for about so long before anybody hears of their tokens, or can join; 0: one at a time.
    `LLM` sets it to 50 unless told otherwise. Never changes a token."""
    proposer: Literal["off", "auto", "ngram", "jacobi", "lookahead", "online", "draft_model", "self_draft", "medusa"] = "off"
    """Where drafts come from; `auto`: from the n-gram index, the online table, and those of the last three that are configured.
    Never changes a token, unless `acceptance_method` says so."""
    max_draft_tokens: int = 16
    """Most draft nodes of a sequence in a step."""
    adaptive_speculation: bool = True
    """Draft as much as pays by measured acceptance and step times, down to nothing; False: as much as there is room for."""
    draft_model: str = ""
    """For `draft_model`: a smaller model with the same vocabulary, named as models are."""
    draft_layers: int = 0
    """For `self_draft`: how many of the model's first layers draft; `headrace calibrate` suggests a number."""
    medusa_heads: str = ""
    """For `medusa`: a safetensors file with heads that were trained for the model."""
    draft_depth: int = 4
    """Most drafts in a row of the three above."""
    draft_width: int = 1
    """Drafts at each depth: 1 makes chains, more makes trees of the draft's likeliest tokens."""
    acceptance_method: AcceptanceMethod = "exact"
    """What becomes of drafts. `exact`: the tokens are those of plain decoding. `rejection`: textbook rejection sampling, the same
    distribution. `typical`: lossy."""
    prefix_cache: bool = True
    """Keep the KV of past and running requests, while there is room, for requests that begin alike; never changes a token."""
    target_token_ms: float = 0
    """Time per token beyond which requests wait instead of joining in; 0: none."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own."""
