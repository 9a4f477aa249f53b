"""Messages between an engine process and its client: msgpack frames, each after its length."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from headrace.backend_traits import KvDtype
from headrace.config import AcceptanceMethod, Activations, EngineConfig, LatentAttention
from headrace.outputs import Logprobs
from headrace.request import DEFAULT_OPTIONS, PoolingParams, RequestOptions
from headrace.sampling_params import SamplingParams

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 64 << 20
CONTENT_TYPE = "application/msgpack"

ErrorKind = Literal["request", "not_finite", "closed", "rank_lost", "internal", "quarantined"]


class Setup(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The first frame: load a model and adapters.

    The reply is `EngineInfo`, or `Refused` with an empty id.
    """

    model: str
    config: EngineConfig
    adapters: dict[str, str]


class Add(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    """Queue a request. The reply is `Accepted` or `Refused`."""

    id: str = ""
    prompt_token_ids: list[int]
    params: SamplingParams | None = None
    pooling: PoolingParams | None = None
    options: RequestOptions = DEFAULT_OPTIONS
    output_token_ids: list[list[int]] = []
    """Tokens that another engine has generated, for each output."""
    mark: bytes = b""
    """Identity of the request at a frontend, which has added a seed; see `request_key`."""

    @property
    def num_sequences(self) -> int:
        """Sequences that a worker counts."""
        return (self.params.beam_width or self.params.n) if self.params else 1

    @property
    def known_tokens(self) -> list[int]:
        return self.prompt_token_ids + (self.output_token_ids[0] if self.output_token_ids else [])


class Abort(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """End a request, if it is running. There is no reply."""

    id: str


class Finish(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """End a request, if it is running, as a stop string would. Its last events follow."""

    id: str


class Release(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Stop keeping the KV of paths of sessions. There is no reply, and no id."""

    id: str
    names: list[str]
    prefix: str = ""
    """Beginning of the names of further paths; empty: none."""


class LoadAdapter(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The reply is `Accepted` or `Refused`."""

    id: str
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The reply is `Accepted` or `Refused`."""

    id: str
    name: str


class MapBlocks(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Report KV blocks. The reply is `Blocks` or `Refused`."""

    id: str


Command = Add | Abort | Finish | Release | LoadAdapter | UnloadAdapter | MapBlocks


class EngineInfo(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    architecture: str
    vocab_size: int
    dim: int
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    """Token slots of the KV group with the longest window."""
    kv_bytes: int
    weight_bytes: int
    kv_dtype: KvDtype
    threads: int
    backend: str
    lossy: str
    activations: Activations
    block_size: int
    latent_attention: LatentAttention = "plain"
    acceptance_method: AcceptanceMethod = "exact"
    instructions: str = ""
    """See `backend.instructions`."""
    version: str = ""
    """Of Headrace, whose kernels may round differently from version to version."""
    adapters: dict[str, str] = {}
    """Digests of the adapters of `Setup`, by name."""
    memory: int = 0
    """Bytes that were available before the model was loaded; 0: unknown."""
    runtime: int = 0
    """Bytes reserved for everything except weights and KV."""
    mode_price: str = ""
    """Loss of the lossy options, in words."""


class Log(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A line for the log, while the engine loads."""

    level: int
    message: str


class Accepted(msgspec.Struct, array_like=True, tag=True, frozen=True):
    id: str
    digest: str = ""
    """Of a loaded adapter."""


class Refused(msgspec.Struct, array_like=True, tag=True, frozen=True):
    id: str
    kind: ErrorKind
    message: str


class StepOutput(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    """See `request.Update`."""

    id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs]
    finish_reason: str | None
    stop_reason: int | str | None


class Ended(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    id: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    error: Refused | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    embedding: bytes | None = None
    """The pooled embedding: float32, little endian."""
    detokenise: float = 0.0


class Report(msgspec.Struct, array_like=True, tag=True, frozen=True):
    figures: dict[str, float]
    """The numeric fields and KV properties of `stats.Stats`."""
    adapters: dict[str, int]
    drafts: dict[str, list[float]]
    """Steps, proposed and accepted tokens of each proposer."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """The KV blocks of a sequence. A run is a pair: the first block, the number of blocks."""

    request: str
    seq: int
    computed: int
    """Slots with KV, counted from position 0 and including released blocks."""
    released: int
    """Blocks at the beginning that the sequence has released."""
    runs: list[int]


class GroupBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """See `stats.GroupMap`."""

    layers: int
    window: int
    num_blocks: int
    holdings: list[Holding]
    cached: list[int]
    """Free blocks with cached KV, as runs in ascending order."""


class Blocks(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """See `stats.BlockMap`."""

    id: str
    block_size: int
    groups: list[GroupBlocks]


Event = EngineInfo | Log | Accepted | Refused | StepOutput | Ended | Report | Blocks
Reply = Accepted | Blocks

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def encode(*frames: Setup | Command | Event) -> bytes:
    parts: list[bytes] = []
    for frame in frames:
        body = _encoder.encode(frame)
        parts += (length_prefix(body), body)
    return b"".join(parts)


def length_prefix(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "little")


def read_setup(body: bytes) -> Setup:
    return msgspec.msgpack.decode(body, type=Setup)


def read_command(body: bytes) -> Command:
    command: Command = _commands.decode(body)
    return command


def read_event(body: bytes) -> Event:
    event: Event = _events.decode(body)
    return event


def bodies(buffer: bytearray) -> Iterator[bytes]:
    """Remove all complete frames. Raises ValueError for a frame above `MAX_FRAME_BYTES`."""
    start = 0
    try:
        while len(buffer) - start >= LENGTH_BYTES:
            size = int.from_bytes(buffer[start : start + LENGTH_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size:,} bytes is above {MAX_FRAME_BYTES:,}")
            if len(buffer) - start - LENGTH_BYTES < size:
                return
            yield bytes(buffer[start + LENGTH_BYTES : start + LENGTH_BYTES + size])
            start += LENGTH_BYTES + size
    finally:
        del buffer[:start]
