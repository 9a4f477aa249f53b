"""Statistics of an engine: counters, sizes, and ratios of them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from headrace.outputs import DraftStats


class KvStats(NamedTuple):
    """KV of one KV group: layers with equal KV layout and attention window."""

    layers: int
    window: int
    """Positions that a row attends to, its own included; 0: all."""
    block_size: int
    """Tokens per block."""
    block_bytes: int
    blocks_total: int
    blocks_free: int
    """Blocks that no sequence holds, cached blocks included."""
    blocks_cached: int
    """Free blocks whose KV a new prompt can still hit."""
    slots_empty: int
    """Token slots without KV, in blocks that sequences hold."""
    slots_promised: int
    """Empty slots that the known tokens of running prompts will fill."""

    @property
    def blocks_used(self) -> int:
        return self.blocks_total - self.blocks_free

    @property
    def slot_bytes(self) -> float:
        """Bytes per token."""
        return self.block_bytes / self.block_size


STEP_KINDS = ("decode_steps", "prompt_steps")
"""Fields of `Stats` with totals of steps."""


class StageStep(NamedTuple):
    """Run time of one step in one pipeline stage, in seconds of a clock that all ranks share."""

    rank: int
    number: int
    """Number of the step on this rank, from 0."""
    begin: float
    """Time at which the stage had its input."""
    end: float


class StepTotals(NamedTuple):
    """Sums over steps. A sequence with several scheduled tokens counts as a prompt."""

    seconds: float = 0.0
    steps: int = 0
    seqs: int = 0
    """Sequences that decode."""
    rows: int = 0
    """Rows of these sequences, drafts included."""
    context: int = 0
    """Tokens with KV of these sequences before each step."""
    prompts: int = 0
    prompt_rows: int = 0
    prompt_context: int = 0
    """Tokens with KV of the prompts before each step."""
    logit_rows: int = 0
    tokens: int = 0
    """Output tokens."""

    def plus(self, more: "StepTotals") -> "StepTotals":
        return StepTotals._make([a + b for a, b in zip(self, more, strict=True)])

    def minus(self, before: "StepTotals") -> "StepTotals":
        return StepTotals._make([a - b for a, b in zip(self, before, strict=True)])


NO_STEPS = StepTotals()


class LearningStats(NamedTuple):
    """Counters of a drafter that learns while it serves (`learn_drafts`)."""

    is_on: bool = False
    """Whether it learns; False after a failure, or without the option."""
    tokens: int = 0
    """Verified tokens that entered the buffer."""
    trained_tokens: int = 0
    """Tokens trained on, repetitions included."""
    slices: int = 0
    """Pieces of work of the trainer, each about 50 ms or less."""
    swaps: int = 0
    """Times that the proposer got new weights."""
    rollbacks: int = 0
    """Times that it got the earlier weights again, because acceptance fell."""
    acceptance_before: float = 0.0
    """Share of first drafts that were right, before the last new weights."""
    acceptance: float = 0.0
    """The same with the present weights."""


NO_LEARNING = LearningStats()


class Stats(NamedTuple):
    """Snapshot of an engine: its present state, and counters since its start.

    Times are in seconds. Rates are means of the last few seconds.
    """

    running: int
    """Sequences with KV."""
    waiting: int
    """Sequences that wait for their first step, or were preempted."""
    kv: list[KvStats]
    """One entry per KV group."""
    steps: int
    rows: int
    rows_last: int
    """Rows of the last step."""
    step_seconds: float
    """Duration of the last step."""
    tokens: int
    """Output tokens."""
    tokens_per_second: float
    rows_per_second: float
    prompt_tokens: int
    """Prompt tokens of all admitted requests."""
    drafted: int
    """Draft tokens in steps."""
    accepted: int
    """Accepted draft tokens."""
    proposer_failures: int
    """Times that a proposer raised an error, hung or returned invalid drafts."""
    drafts: dict[str, DraftStats]
    """Counters of speculative decoding, by proposer."""
    preemptions: int
    finished: int
    """Requests with a result."""
    aborted: int
    refused: int
    """Requests that `Engine.check` rejected."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    failed_steps: int = 0
    """Steps that failed: the engine recomputed their requests, or ended one with an error."""
    offloaded_blocks: int = 0
    """KV blocks copied to host memory."""
    restored_blocks: int = 0
    """KV blocks copied back from host memory."""
    kv_host_bytes: int = 0
    """Bytes of host memory in use for offloaded KV."""
    disk_saved_blocks: int = 0
    """KV blocks written to `kv_cache_dir`."""
    disk_loaded_blocks: int = 0
    """KV blocks read from `kv_cache_dir`."""
    disk_dropped_blocks: int = 0
    """KV blocks that `kv_cache_dir` missed: they left memory before the disk took them."""
    kv_disk_bytes: int = 0
    """Bytes of `kv_cache_dir`, for all models and processes."""
    grammar_bytes: int = 0
    """Estimated bytes of the grammar states of all structured outputs in the engine."""
    forced: int = 0
    """Output tokens that a grammar forced; each saved a step."""
    expert_loads: Sequence[Sequence[int]] = ()
    """Rows of each expert, by mixture-of-experts layer; empty for dense models."""
    adapters: Mapping[str, int] = MappingProxyType({})
    """Running and waiting requests, by loaded adapter."""
    decode_steps: StepTotals = NO_STEPS
    """Totals of the steps without a prompt."""
    prompt_steps: StepTotals = NO_STEPS
    adapter_bytes: int = 0
    """Bytes of the numbers of all adapters in memory, as they were read. Rank 0 of several keeps
    these bytes for a restart."""
    learning: LearningStats = NO_LEARNING
    kept_paths: int = 0
    """Paths of sessions whose KV the engine keeps."""
    kept_blocks: int = 0
    """Blocks of these paths; some belong to running sequences, too."""

    @property
    def blocks_total(self) -> int:
        """Blocks of all KV groups together, as for the next three properties."""
        return sum(group.blocks_total for group in self.kv)

    @property
    def blocks_free(self) -> int:
        return sum(group.blocks_free for group in self.kv)

    @property
    def blocks_cached(self) -> int:
        return sum(group.blocks_cached for group in self.kv)

    @property
    def blocks_used(self) -> int:
        return sum(group.blocks_used for group in self.kv)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(group.blocks_total * group.block_bytes for group in self.kv)

    @property
    def kv_bytes_used(self) -> int:
        """Bytes of the blocks that sequences hold."""
        return sum(group.blocks_used * group.block_bytes for group in self.kv)

    @property
    def occupancy(self) -> float:
        """Share of the KV memory that sequences hold."""
        return self.kv_bytes_used / self.kv_bytes

    @property
    def waste(self) -> float:
        """Share of the KV memory in use that is empty."""
        return ratio(
            sum(group.slots_empty * group.slot_bytes for group in self.kv), self.kv_bytes_used
        )

    @property
    def fragmentation(self) -> float:
        """Share of the KV memory in use that no known token will fill: the price of whole
        blocks.
        """
        lost = sum(
            (group.slots_empty - group.slots_promised) * group.slot_bytes for group in self.kv
        )
        return ratio(lost, self.kv_bytes_used)

    @property
    def rows_mean(self) -> float:
        """Mean rows per step."""
        return ratio(self.rows, self.steps)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that came from the prefix cache."""
        return ratio(self.cached_tokens, self.prompt_tokens)

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that were accepted."""
        return ratio(self.accepted, self.drafted)


class SequenceStats(NamedTuple):
    """One sequence, as a row of `headrace top`."""

    request: str
    seq: int
    prompt: int  # tokens
    output: int  # tokens
    cached: int
    """Prompt tokens whose KV came from the prefix cache."""
    state: str
    """waiting, preempted, prefill, decode, or padding. Padding has ended, but runs on
    in a static batch.
    """
    age: float
    """Seconds since the request was added."""


class Holding(NamedTuple):
    """KV blocks of one sequence."""

    request: str
    seq: int
    computed: int
    """Slots with KV, from the first slot on."""
    blocks: list[int]
    """Blocks in the order of their positions; -1 for a released block at the start."""


class GroupMap(NamedTuple):
    """Blocks of each sequence in one KV group."""

    layers: int
    window: int
    """Positions that a row attends to, its own included; 0: all."""
    num_blocks: int
    holdings: list[Holding]
    cached: Sequence[int] = ()
    """Free blocks whose KV a new prompt can still hit."""


class BlockMap(NamedTuple):
    """Blocks of each sequence, by KV group."""

    block_size: int
    groups: list[GroupMap]


def ratio(part: float, whole: float) -> float:
    """Return `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0
