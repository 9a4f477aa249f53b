"""What an engine says of itself: records, and the ratios that follow from them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from headrace.outputs import DraftStats


class KvStats(NamedTuple):
    """The KV of layers that keep alike and see alike."""

    layers: int
    window: int
    """Positions that a row sees, its own included; 0: all."""
    block_size: int
    """Tokens."""
    block_bytes: int
    blocks_total: int
    blocks_free: int
    """Those that only the prefix cache keeps included."""
    blocks_cached: int
    """Free blocks that still hold KV which a prompt may find again."""
    slots_empty: int
    """Token slots of blocks in use that hold no KV."""
    slots_promised: int
    """Those of them that known tokens will fill: of prompts that are being read."""

    @property
    def blocks_used(self) -> int:
        return self.blocks_total - self.blocks_free

    @property
    def slot_bytes(self) -> float:
        """Bytes of a token."""
        return self.block_bytes / self.block_size


class StageStep(NamedTuple):
    """A step in one stage of a pipeline, on one rank: from when it had what it reads to its end.
    Seconds by a clock that ranks share.
    """

    rank: int
    number: int
    """Steps of that rank before it."""
    begin: float
    end: float


class Stats(NamedTuple):
    """What the engine does now, and what it has done since it was made. Times are seconds, rates
    are of the last few seconds.
    """

    running: int
    """Sequences with KV."""
    waiting: int
    """Sequences that wait for their first step, or for their next after preemption."""
    kv: list[KvStats]
    """Of each group of layers."""
    steps: int
    rows: int
    rows_last: int
    """Rows of the last step."""
    step_seconds: float
    """What the last step took."""
    tokens: int
    """Output tokens."""
    tokens_per_second: float
    rows_per_second: float
    prompt_tokens: int
    """Of all requests that were admitted."""
    drafted: int
    """Draft rows."""
    accepted: int
    """Those that were right."""
    proposer_failures: int
    """Times that a proposer failed, hung or said rubbish; the step went on without its draft."""
    drafts: dict[str, DraftStats]
    """What came of speculation, by method."""
    preemptions: int
    finished: int
    """Requests with a result."""
    aborted: int
    refused: int
    """Requests that could not be served as written."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""
    failed_steps: int = 0
    """Steps whose requests were recomputed, or of which one ended with an error."""
    offloaded_blocks: int = 0
    """Blocks of KV that were copied to the host's memory."""
    restored_blocks: int = 0
    """Those that were copied back."""
    kv_host_bytes: int = 0
    """Bytes of the host's memory that hold such copies."""
    forced: int = 0
    """Output tokens that a grammar forced, each of which saved a step."""
    expert_loads: Sequence[Sequence[int]] = ()
    """Rows that have gone to each expert, by layer of experts; none for a model without."""
    adapters: Mapping[str, int] = MappingProxyType({})
    """Requests under way with each loaded adapter."""

    @property
    def blocks_total(self) -> int:
        """Of all groups, as the next three."""
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
        """Share of the KV memory in use that holds nothing."""
        return ratio(
            sum(group.slots_empty * group.slot_bytes for group in self.kv), self.kv_bytes_used
        )

    @property
    def fragmentation(self) -> float:
        """Share of the KV memory in use that no known token will fill: what is lost because memory
        is dealt in blocks.
        """
        lost = sum(
            (group.slots_empty - group.slots_promised) * group.slot_bytes for group in self.kv
        )
        return ratio(lost, self.kv_bytes_used)

    @property
    def rows_mean(self) -> float:
        """Rows of a step."""
        return ratio(self.rows, self.steps)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return ratio(self.cached_tokens, self.prompt_tokens)

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that were right."""
        return ratio(self.accepted, self.drafted)


class SequenceStats(NamedTuple):
    """One sequence, as a line of a table."""

    request: str
    seq: int
    prompt: int
    """Tokens."""
    output: int
    """Tokens."""
    cached: int
    """Prompt tokens whose KV was there already."""
    state: str
    """waiting, preempted, prefill, decode, or padding: it has ended, and a static batch goes on
    computing it.
    """
    age: float
    """Seconds since the request came."""


class Holding(NamedTuple):
    """The blocks of a sequence, in position order, -1 for those at its beginning that it let go.

    The first `computed` of their slots hold KV.
    """

    request: str
    seq: int
    computed: int
    blocks: list[int]


class GroupMap(NamedTuple):
    """Which sequence holds which block in one KV group."""

    layers: int
    window: int
    """Positions that a row sees, its own included; 0: all."""
    num_blocks: int
    holdings: list[Holding]
    cached: Sequence[int] = ()
    """Free blocks that still hold KV which a prompt may find again."""


class BlockMap(NamedTuple):
    """Which sequence holds which block."""

    block_size: int
    groups: list[GroupMap]


def ratio(part: float, whole: float) -> float:
    """The share that a part is of the whole, and 0 of nothing."""
    return part / whole if whole else 0.0
