"""Engine options: `EngineConfig`, the KV size of an executable, and presets of defaults."""

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from headrace.backend_traits import BackendName, BackendTraits, KvChoice, KvDtype, traits_of
from headrace.record import frozen

if TYPE_CHECKING:  # help and other short commands need no NumPy
    import numpy as np
    from numpy.typing import NDArray

Activations = Literal["int8", "f32"]
LatentAttention = Literal["plain", "absorbed"]
RopeScaling = Literal["none", "linear", "yarn"]
AcceptanceMethod = Literal["exact", "rejection", "typical"]
DraftFormat = Literal["mixed", "q4_1", "q8_0", "file"]

LOSSY_OPTIONS = (
    "attention_window",
    "attention_sinks",
    "attention_top_blocks",
    "early_exit",
    "activation_sparsity",
)
"""Options that make another model of a model. `headrace eval` takes them and measures the loss."""
LOSSY_FILES: tuple[str, ...] = ("early_exit", "activation_sparsity")
"""Those of the options that name a calibration file."""


@frozen(eq=False)
class KeyRounding:
    """How the int4 keys of a layer are rounded (`quant/key_rounding.py`)."""

    layer: int
    centre: "NDArray[np.float32]"
    """Numbers that keys are stored without, [KV heads, key size]."""
    feedback: "NDArray[np.float32]"
    """[KV heads, key size, key size]: the error of number i times row i comes off the numbers after
    i. Zeros up to the diagonal; the others are bf16.
    """

    def heads(self, first: int, last: int) -> "KeyRounding":
        return KeyRounding(self.layer, self.centre[first:last], self.feedback[first:last])


@frozen
class KvConfig:
    """Size and number format of an executable's KV cache."""

    num_blocks: tuple[int, ...] = (64,)
    """Blocks of each KV group, shared by all sequences."""
    block_size: int = 32
    """Tokens per block."""
    dtype: KvDtype = "bf16"
    """Number format of keys and values; fp8, int8 and int4 have one scale per token and head."""
    key_rounding: tuple[KeyRounding, ...] = ()
    """Of the layers whose int4 keys are not rounded number by number."""


@frozen
class EngineConfig:
    """Options of an engine.

    No option changes a token of the output, unless its description says so.
    """

    backend: BackendName = "auto"
    """Compute backend: `cpu` (C++ kernels), `cuda` (Triton kernels), `reference`
    (NumPy, for tests), or `auto`: `cuda` if the GPU has compute capability 8.0 or
    higher, the extra `cuda` is installed and the model fits; else `cpu`. Tokens may
    differ between backends.
    """
    threads: int = 0
    """Compute threads per process; 0: an even share of the physical cores that it may use."""

    tensor_parallel_size: int = 1
    """Processes that share each weight matrix and the KV heads."""
    pipeline_parallel_size: int = 1
    """Pipeline stages, each with `tensor_parallel_size` processes."""
    pipeline_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty: stages that read equally many bytes per decode step."""
    enable_expert_parallel: bool = True
    """Whether each process of a layer holds only some of its experts; else each holds all."""
    enable_sequence_parallel: bool = False
    """Whether to shard the residual stream and norms across ranks (Megatron sequence
    parallelism). Each rank needs less work and memory, for one more exchange per layer.
    """

    kv_dtype: KvChoice = "auto"
    """Number format of keys and values. It changes tokens. `auto` is `f16` for models with large
    key biases, such as Qwen2 and Qwen2.5, and else `bf16`.
    """
    activations: Activations = "int8"
    """Number format of activations in products with quantised weights: `int8` in groups
    of 32 columns, or `f32`, which is exact and slower. It changes tokens. Weights in
    int8 with one scale per row always use int8 activations. A GPU uses bf16 in place of
    `int8` for other weights.
    """
    latent_attention: LatentAttention = "plain"
    """Form of multi-head latent attention (DeepSeek). `plain` caches a key and a value
    per head. `absorbed` caches one latent row, a ninth of the memory with 16 heads, and
    computes three times as much. The forms round differently, so tokens may differ.
    """

    chat_template: str = ""
    """Jinja file with a chat template, or its text, in place of the model's own
    templates; empty: the model's own.
    """

    kv_blocks: int = 0
    """KV blocks of the layers with the widest attention window; other layers get the
    number that these sequences can need. 0: enough for `max_num_seqs` sequences of full
    length, but at most half of the memory that weights leave, or 90 % of a GPU's.
    """
    kv_offload_bytes: int = 0
    """Bytes of pinned host memory for prefix-cache blocks that a GPU evicts; 0: no
    offloading. Blocks are loaded again if that is faster than recomputing them. A CPU
    ignores the option.
    """
    kv_cache_dir: str = ""
    """Folder that keeps the blocks of the prefix cache for later runs of the same model; empty:
    none. A reader of the folder can read the prompts. `cpu` with one process only.
    """
    kv_cache_dir_bytes: int = 10 << 30
    """Maximum bytes of `kv_cache_dir`, for all models together. The least recently used blocks are
    deleted first.
    """
    prefix_cache: bool = True
    """Whether requests with equal prompt prefixes share KV, during and after their runs."""
    max_model_len: int = 0
    """Maximum tokens of a sequence, prompt and output; 0: the model's trained context.
    Models whose rotary scaling depends on the context may give other tokens.
    """
    rope_scaling: RopeScaling | None = None
    """Rule that stretches the context by `rope_scale`, in place of the rule of the model's
    files: `yarn` (for models whose cards advise it), `linear`, or `none`. A mapping with
    the fields of `rope_scaling` in a `config.json` sets the next options too. None: the
    model's own rule. The rotary options change tokens.
    """
    rope_scale: float = 0
    """Factor of the context, with `rope_scaling`; 0: the factor of the model's rule."""
    rope_theta: float = 0
    """Base of the rotary frequencies; 0: the model's own."""
    yarn_orig_ctx: int = 0
    """Tokens of context before YaRN stretches it; 0: the model's trained context."""
    attention_window: int = 0
    """Tokens that each layer without a window of its own attends to, besides the first
    `attention_sinks` tokens, in bounded KV memory; 0: no such window. It is lossy and
    changes tokens, for models that were trained without a window.
    """
    attention_sinks: int = 4
    """First tokens that stay visible with an `attention_window`. Without them
    generation breaks (attention sinks, Xiao et al. 2023).
    """

    attention_top_blocks: int = 0
    """Blocks of 32 tokens that each layer and KV head chooses for a row, besides its
    first block and the last two, by bounds of their scores (Quest, Tang et al. 2024);
    0: all blocks. Decoding then reads this part of a long context. It is lossy and
    changes tokens; `cpu` and `reference` only.
    """
    early_exit: str = ""
    """Calibration file of an early exit (`headrace calibrate --early-exit`): a token that is
    clear after the first layers leaves out the others. It is lossy and changes tokens. The
    proposer `self_draft` or `auto` makes it faster.
    """
    skip_zeros: bool = False
    """Whether to leave out the weights that meet zeros of a ReLU. No token changes. The matrices
    `up` and `down` are kept twice, so they need twice their memory. For the `cpu` backend.
    """
    activation_sparsity: str = ""
    """File of `headrace calibrate --sparsity` with thresholds up to which activations become 0
    (TEAL, Liu et al. 2024); empty: none. It is lossy and changes tokens. A step of few rows on
    a CPU then leaves out weights, and keeps the layers' matrices twice.
    """

    batching: Literal["inflight", "static"] = "inflight"
    """Batching policy: `inflight` lets requests join and leave at every step; `static`
    starts and ends a batch together, as a baseline to measure against.
    """
    max_num_seqs: int | None = None
    """Maximum sequences per step. None: 64, or 256 on a GPU (`max_seqs`)."""
    max_num_batched_tokens: int | None = None
    """Maximum rows per step: decode rows first, then prompt chunks. None: 512, or 2,048
    on a GPU (`max_rows`).
    """
    chunked_prefill_size: int | None = None
    """Prompt rows of a step that also decodes, plus one row per decoding sequence. Deep
    in a context the scheduler takes fewer, because attention costs more there. Small
    values keep the time between tokens short; large values favour throughput. With 16
    on a CPU, a long prompt can triple the time between tokens of other requests. 0:
    `max_num_batched_tokens`. None: 16, or 256 on a GPU (`max_chunk_rows`).
    """
    max_logit_rows: int = 0
    """Maximum rows with logits per step, besides one per sequence, for prompt
    log-probabilities and drafts; it bounds the memory of logits. 0: the number
    that fits in 64 MiB, at least 64.
    """
    multi_step_ms: float = 10
    """Milliseconds of plain decoding before tokens are handed out; a new request ends
    the run after the current step. 0: one step at a time.
    """
    target_token_ms: float = 0
    """Milliseconds of a step above which waiting requests are not admitted; 0: no limit."""
    priority_scheduling_preemption_threshold: int = 1
    """Minimum difference of priorities at which a waiting request preempts running ones, if
    that costs them fewer steps than it saves the request; 0: never. Static batching ignores it.
    """
    queue_timeout: float = 0
    """Seconds that a request may wait for its first step before it ends with `timeout`;
    0: no limit.
    """
    seed: int | None = 0
    """Base seed for requests that set none. It changes their sampled tokens. None: a new
    random seed for each engine, as in servers, so that a restart repeats no noise.
    """

    proposer: Literal[
        "off",
        "auto",
        "suffix",
        "jacobi",
        "lookahead",
        "draft_model",
        "self_draft",
        "medusa",
    ] = "off"
    """Source of draft tokens (speculative decoding). `auto`: the suffix tree, and
    each of `draft_model`, `self_draft` and `medusa` that is configured.
    """
    max_draft_tokens: int = 16
    """Maximum draft tokens per sequence and step."""
    adaptive_speculation: bool = True
    """Whether to draft as much as saves time, by measured acceptance and step times;
    else as much as fits into the step.
    """
    draft_model: str = ""
    """Draft model for `draft_model`: an alias, path, `hf:` or `pypi:` name of a smaller
    model, the folder of an EAGLE drafter of the model, or `mtp` for the layer for
    drafts in the model's own files (DeepSeek-V3, MiMo). A model with another vocabulary
    drafts by text, and fewer of its tokens are accepted.
    """
    draft_format: DraftFormat = "mixed"
    """Format on `cpu` of those matrices of an EAGLE-3 drafter, or of the layer for drafts, that
    their file has in 16 or 32 bits; `mixed`: the head as Q8_0 and the others as Q4_1; `file`: as
    they are. Fewer bits make drafts faster, and fewer of them are accepted.
    """
    draft_layers: int | str | tuple[int, ...] = 0
    """Layers of the model that draft for `self_draft`: a number of first layers, or a list of
    layers from 0, such as `0-9,14,29`; 0: all. `headrace calibrate` suggests them.
    """
    draft_top_blocks: int = 0
    """Blocks of 32 tokens that each layer and KV head of `self_draft` chooses, as
    `attention_top_blocks` does, over the model's own KV; 0: all blocks.
    """
    draft_weights: str = ""
    """Weights that draft for `self_draft` in place of the model's: a file or folder of the
    same model in fewer bytes (a smaller format, 2:4, experts). Equal tensors are shared.
    """
    draft_sparsity: str = ""
    """File of thresholds, as `activation_sparsity`, for the drafts of `self_draft` only."""
    learn_drafts: str = ""
    """Whether the EAGLE-3 drafter of `draft_model` goes on learning from the outputs while the
    engine is idle: `on`, or a folder that keeps what it learned for the next start; empty: off.
    It needs the extra `train`. No token changes.
    """
    learn_drafts_bytes: int = 128 << 20
    """Bytes of the latest outputs to learn from, with their rows."""
    learn_salted: bool = False
    """Whether `learn_drafts` also learns from requests with a cache salt: their words may then
    show in the drafts, and so in the speed, of other requests.
    """
    medusa_heads: str = ""
    """Safetensors file or folder for `medusa`, with heads that were trained for the model."""
    draft_depth: int = 4
    """Maximum length of a draft chain, for `draft_model`, `self_draft` and `medusa`."""
    draft_width: int = 1
    """Nodes of a draft that continue at each depth: 1 drafts a chain, more draft a tree of the
    likeliest tokens, with up to `draft_depth` times as many nodes.
    """
    jump_forward: bool = True
    """Whether to take several tokens in one step, up to `max_draft_tokens`, if the
    grammar of a structured output allows only these.
    """
    acceptance_method: AcceptanceMethod = "exact"
    """Verification of drafts. `exact`: the tokens of plain decoding. `rejection`:
    rejection sampling, with the same distribution but other tokens. `typical`: typical
    acceptance, which is lossy.
    """

    @property
    def kv_format(self) -> KvDtype:
        """`kv_dtype`, or `bf16` for `auto`, which the loader replaces if a model needs another."""
        return "bf16" if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def traits(self) -> BackendTraits:
        return traits_of(self.backend)

    @property
    def max_seqs(self) -> int:
        """Maximum sequences per step, with the backend's default."""
        return self.max_num_seqs or self.traits.max_num_seqs

    @property
    def max_rows(self) -> int:
        """Maximum rows per step, with the backend's default."""
        return self.max_num_batched_tokens or self.traits.max_num_batched_tokens

    @property
    def max_chunk_rows(self) -> int:
        """Maximum prompt rows of a step that also decodes: `chunked_prefill_size`, resolved."""
        if self.chunked_prefill_size is None:
            return min(self.max_rows, self.traits.chunked_prefill_size)
        return self.chunked_prefill_size or self.max_rows

    @property
    def shown(self) -> dict[str, Any]:
        """Options that `headrace top` shows, as JSON values."""
        names = ("backend", "threads", "batching", "proposer")
        limits = {
            "kv_dtype": self.kv_format,
            "max_num_seqs": self.max_seqs,
            "max_num_batched_tokens": self.max_rows,
        }
        modes = {name: getattr(self, name) for name in LOSSY_OPTIONS} if self.lossy else {}
        return {name: getattr(self, name) for name in names} | limits | {"modes": modes}

    @property
    def lossy(self) -> str:
        """Description of the lossy options in use; empty if the model runs unchanged."""
        return "; ".join(self.lossy_modes)

    @property
    def lossy_modes(self) -> tuple[str, ...]:
        """A description of each lossy mode in use."""
        descriptions = (
            self._window_loss,
            self._top_blocks_loss,
            self._exit_loss,
            self._sparsity_loss,
        )
        return tuple(filter(None, descriptions))

    @property
    def _sparsity_loss(self) -> str:
        if not self.activation_sparsity:
            return ""
        return f"sets small activations to 0, by {self.activation_sparsity}"

    @property
    def _window_loss(self) -> str:
        if not self.attention_window:
            return ""
        sinks = f"the first {self.attention_sinks:,} and " if self.attention_sinks else ""
        return f"attends to {sinks}the last {self.attention_window:,} tokens only"

    @property
    def _top_blocks_loss(self) -> str:
        if not self.attention_top_blocks:
            return ""
        return (
            "attends to the first, the last 2 and the best "
            f"{self.attention_top_blocks:,} blocks of 32 tokens"
        )

    @property
    def _exit_loss(self) -> str:
        if not self.early_exit:
            return ""
        return f"takes clear tokens from the first layers (early exit, {self.early_exit})"


@frozen
class Preset:
    """Defaults of one entry point, where they differ from the defaults of the records."""

    engine: Mapping[str, Any] = field(default_factory=dict)
    """Values by field of `EngineConfig`."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Values by field of `SamplingParams`."""


SERVING = Preset()
"""`AsyncLLM` and `headrace serve`: many callers that read tokens as they come."""

OFFLINE = Preset(
    engine=MappingProxyType(
        {
            # Complete results come soonest with large chunks; no reader waits for single tokens.
            "chunked_prefill_size": 0,
            # Fewer, longer calls take less time in total. Streamed text still arrives 20 times a
            # second.
            "multi_step_ms": 50.0,
        }
    )
)
"""`LLM` and `headrace bench`: one program that waits for complete results."""

INTERACTIVE = Preset(
    engine=MappingProxyType(
        {
            # One person asks one question at a time, so the KV pool is for one sequence, or for
            # the beams of one search.
            "max_num_seqs": 1,
            # A single sequence leaves arithmetic idle that can verify drafts. Responses often
            # quote their prompt; if they do not, the adaptive policy stops drafting.
            "proposer": "auto",
        }
    ),
    sampling=MappingProxyType(
        {
            # Small models fall into loops. A low temperature without the unlikely tail, and a
            # penalty that does not grow, keep them out. Without the penalty 4 of 24 responses of
            # the default model looped, with it none. Prompts are not penalised.
            "temperature": 0.3,
            "min_p": 0.05,
            "presence_penalty": 1.0,
            # The same question gets the same response every time.
            "seed": 0,
            # A response ends when the model ends it, or when the context is full.
            "max_tokens": None,
        }
    ),
)
"""`headrace run`, and the sampling of `LLM.chat`: one person who reads along."""
