"""What the API process and the engine process say to each other: msgpack frames over a socket, each
after its length.

Only what is new crosses it: the tokens of a step once, and no result as a whole. Errors cross it as
a kind and a message.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from headrace.backend_traits import KvDtype
from headrace.config import Activations, EngineConfig
from headrace.request import (
    DEFAULT_OPTIONS,
    Logprobs,
    PoolingParams,
    RequestOptions,
    SamplingParams,
)

HEAD = 4
"""Bytes before each frame: its length, little endian."""
MAX_FRAME = 64 << 20
CONTENT_TYPE = "application/msgpack"
"""The type of a frame in the body of an HTTP request."""

ErrorKind = Literal["request", "not_finite", "closed", "internal", "quarantined"]


class Setup(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Load a model with adapters, whose paths are given by name: the first frame. The answer is
    `EngineInfo`, or `Refused` under no id.
    """

    model: str
    config: EngineConfig
    adapters: dict[str, str]


class Add(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    """Check a request and queue it: see `Engine.check`. The reply is `Accepted` or `Refused`."""

    id: str = ""
    """Chosen by the `RemoteEngine` that the request is submitted to."""
    prompt_token_ids: list[int]
    params: SamplingParams | None = None
    pooling: PoolingParams | None = None
    options: RequestOptions = DEFAULT_OPTIONS
    output_token_ids: list[list[int]] = []
    """The tokens that each continuation has already, where another engine began it."""


class Abort(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """End a request; one that has ended is no matter."""

    id: str


class LoadAdapter(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Load an adapter under a name. The answer is `Accepted` or `Refused`, under the id."""

    id: str
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Unload an adapter. The answer is `Accepted` or `Refused`, under the id."""

    id: str
    name: str


class MapBlocks(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Say which request holds which blocks. The answer is `Blocks` or `Refused`, under the id."""

    id: str


Command = Add | Abort | LoadAdapter | UnloadAdapter | MapBlocks


class EngineInfo(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The engine is ready."""

    architecture: str
    vocab_size: int
    dim: int
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    """Token slots of the group of layers that sees furthest."""
    kv_bytes: int
    weight_bytes: int
    kv_dtype: KvDtype
    threads: int
    backend: str
    lossy: str
    activations: Activations
    block_size: int
    """Tokens of a block of KV."""


class Accepted(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What was asked for is done, or queued."""

    id: str


class Refused(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What was asked for cannot be done."""

    id: str
    kind: ErrorKind
    message: str


class StepOutput(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What a step brought to one continuation of a request: see `request.Update`."""

    id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs]
    finish_reason: str | None
    stop_reason: int | str | None


class Ended(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A request has ended; nothing more comes of it."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    queue: float
    prefill: float
    decode: float
    """Seconds, as in `request.Timing`."""
    error: Refused | None
    prompt_logprobs: list[Logprobs | None] | None
    embedding: bytes | None
    """Of a prompt that was embedded: float32, little endian."""


class Report(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What the engine does now, and what it has done: the fields of `stats.Stats` that are numbers,
    and those of its KV.
    """

    figures: dict[str, float]
    adapters: dict[str, int]
    drafts: dict[str, list[float]]


class Holding(msgspec.Struct, frozen=True):
    """The blocks of a sequence."""

    request: str
    seq: int
    computed: int
    """Slots with KV, from the first on, those of blocks that it let go included."""
    released: int
    """Blocks at its beginning that it let go."""
    runs: list[int]
    """Its other blocks in position order, as runs: the first block and their number, for each run.
    """


class GroupBlocks(msgspec.Struct, frozen=True):
    """The blocks of the layers that keep alike and see alike: see `stats.GroupMap`."""

    layers: int
    window: int
    num_blocks: int
    holdings: list[Holding]
    cached: list[int]
    """Free blocks that still hold KV, as runs in ascending order."""


class Blocks(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Which sequence holds which blocks of KV: see `stats.BlockMap`."""

    id: str
    block_size: int
    groups: list[GroupBlocks]


Event = EngineInfo | Accepted | Refused | StepOutput | Ended | Report | Blocks
Answer = Accepted | Blocks
"""What comes of a command that is not refused."""

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def encode(*frames: Setup | Command | Event) -> bytes:
    """Frames as they go over the socket."""
    parts = [_encoder.encode(frame) for frame in frames]
    return b"".join([part for body in parts for part in (len(body).to_bytes(HEAD, "little"), body)])


def read_setup(body: bytes) -> Setup:
    """What the first frame asks for. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(body, type=Setup)


def read_command(body: bytes) -> Command:
    """The command in the body of a frame. Raises msgspec.DecodeError."""
    command: Command = _commands.decode(body)
    return command


def read_event(body: bytes) -> Event:
    """The event in the body of a frame. Raises msgspec.DecodeError."""
    event: Event = _events.decode(body)
    return event


def bodies(buffer: bytearray) -> Iterator[bytes]:
    """Take the bodies of all whole frames from the front of a buffer. Raises ValueError for one
    that is longer than any may be.
    """
    start = 0
    try:
        while len(buffer) - start >= HEAD:
            size = int.from_bytes(buffer[start : start + HEAD], "little")
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size:,} bytes")
            if len(buffer) - start - HEAD < size:
                return
            yield bytes(buffer[start + HEAD : start + HEAD + size])
            start += HEAD + size
    finally:
        del buffer[:start]
