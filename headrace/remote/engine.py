"""Protocol of an engine that runs elsewhere."""

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from headrace.remote import frames
from headrace.remote.stream import Stream

State = Literal["loading", "ready", "stalled", "dead", "closed"]


class RemoteEngine(Protocol):
    """An engine process (`EngineClient`), or several that act as one (`Fleet`)."""

    @property
    def info(self) -> frames.EngineInfo | None:
        """Properties of the engine; None before it is ready for the first time."""

    @property
    def report(self) -> frames.Report: ...

    @property
    def state(self) -> State: ...

    @property
    def ready(self) -> bool: ...

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step started; 0 between steps."""

    @property
    def restarts(self) -> int: ...

    @property
    def exit_code(self) -> int: ...

    @property
    def adapters(self) -> Mapping[str, str]:
        """Paths of the loaded adapters, by name."""

    @property
    def adapter_digests(self) -> Mapping[str, str]:
        """See `checkpoint.adapter_digest`."""

    async def start(self) -> None:
        """Start the engine; return when it is ready. Raises EngineDeadError with the reason."""

    async def submit(self, request: frames.Add) -> Stream:
        """Submit a request; return its stream after the engine accepts it.

        Raises RefusedError, NotReadyError without an engine, and EngineDeadError.
        """

    @property
    def has_sessions(self) -> bool:
        """Whether all requests run in one engine, which keeps the KV of sessions."""

    def release(self, names: Iterable[str]) -> None:
        """Stop keeping the KV of paths, without waiting; never raises."""

    def release_all(self, prefix: str) -> None:
        """Stop keeping the KV of all paths whose names begin with `prefix`."""

    async def load_adapter(self, name: str, path: str) -> None: ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; running requests keep it. Raises as `submit` does."""

    async def block_map(self) -> frames.Blocks:
        """Return the KV blocks of each request, as of the last step. Raises as `submit` does."""

    async def close(self) -> None: ...
