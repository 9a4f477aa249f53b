"""What the routes use of an engine: that of one process beside this one (`engine_client.py`), or a
fleet of them elsewhere.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

from headrace.remote import frames
from headrace.remote.stream import Stream

State = Literal["loading", "ready", "stalled", "dead", "closed"]


class RemoteEngine(Protocol):
    """An engine, or several that look like one."""

    @property
    def info(self) -> frames.EngineInfo | None:
        """What it said of itself; None before it was ready for the first time."""

    @property
    def report(self) -> frames.Report:
        """What it does now, as it last said."""

    @property
    def state(self) -> State:
        """Whether it has a pulse."""

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""

    @property
    def step_seconds(self) -> float:
        """For how long the present step has run."""

    @property
    def restarts(self) -> int:
        """Times that it was started again."""

    @property
    def exit_code(self) -> int:
        """With which this process is to end where it could not be started."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """Paths of the adapters that requests may name, by name."""

    async def start(self) -> None:
        """Start it, and return once it is ready. Raises EngineDeadError, with the reason, where it
        cannot be.
        """

    async def submit(self, request: frames.Add) -> Stream:
        """Send a request, and return the stream of what comes of it once it was taken.

        Raises RefusedError where it cannot be served, NotReadyError where there is no engine,
        EngineDeadError if it ends meanwhile.
        """

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter for requests that name it. Raises as `submit` does."""

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests under way keep it. Raises as `submit` does."""

    async def block_map(self) -> frames.Blocks:
        """Which request holds which blocks, as it is between two steps. Raises as `submit` does."""

    async def close(self) -> None:
        """End it, and all requests with it."""
