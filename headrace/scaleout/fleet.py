"""Many replicas as one engine: a request whose replica goes away goes on elsewhere, and its client
notices nothing.

A request without a seed is given one here, so that whichever replica runs it draws the same tokens.
What its client has been told is remembered; the replica that takes over gets it as output, not as
prompt, and goes on behind it (`Engine.check`). So the client gets every token and every character
once.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from itertools import count
from time import monotonic

import msgspec

from headrace.errors import NoReplicaError
from headrace.remote import frames
from headrace.remote.engine import State
from headrace.remote.errors import EngineDeadError, EngineError, NotReadyError
from headrace.remote.replica_status import ReplicaStatus
from headrace.remote.stream import Stream
from headrace.scaleout.dispatcher import Dispatcher, ReplicaLostError
from headrace.scaleout.gathered import Totals, adapters_of, blocks_of, hello_of
from headrace.scaleout.resumable import Resumable, with_seed
from headrace.scaleout.suspects import Suspects

_MOST_LOSSES = 8
"""Replicas that may go away under a request before it ends with an error."""
_POLL = 0.05
"""Seconds between two looks for a replica, where there is none."""

log = logging.getLogger("headrace.scaleout")


class Fleet:
    """The replicas of a dispatcher, as the routes use an engine: a `RemoteEngine`."""

    exit_code = 1

    def __init__(self, dispatcher: Dispatcher, seed: int = 0, wait_seconds: float = 30.0) -> None:
        """`seed`: that of the engines' configuration; `wait_seconds`: for how long a request waits
        while there is no replica.
        """
        self._dispatcher = dispatcher
        self._seed = seed
        self._wait_seconds = wait_seconds
        self._numbers = count()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._suspects = Suspects()
        self._totals = Totals()
        self._known: list[ReplicaStatus] = []
        """The replicas that there were when there last were any."""
        self._closed = False

    @property
    def info(self) -> frames.EngineInfo | None:
        """What all replicas together say of themselves."""
        known = self._replicas()
        return hello_of(known) if known else None

    @property
    def report(self) -> frames.Report:
        """What all replicas together do."""
        return self._totals.report(self._dispatcher.replicas.values())

    @property
    def state(self) -> State:
        """`ready` while one of them takes requests."""
        if self._closed:
            return "closed"
        if any(replica.accepts_requests for replica in self._dispatcher.replicas.values()):
            return "ready"
        return "stalled" if self._known else "loading"

    @property
    def ready(self) -> bool:
        """Whether requests are taken: while there is no replica they wait."""
        return self.state in ("ready", "stalled")

    @property
    def step_seconds(self) -> float:
        """Of the replica whose step has run longest."""
        return max(
            (replica.step_seconds for replica in self._dispatcher.replicas.values()), default=0.0
        )

    @property
    def restarts(self) -> int:
        """Of the engines of all replicas that are there."""
        return sum(replica.restarts for replica in self._dispatcher.replicas.values())

    @property
    def adapters(self) -> Mapping[str, str]:
        """Those that all replicas have."""
        return adapters_of(self._replicas())

    async def start(self) -> None:
        """Return once a replica takes requests. Raises EngineDeadError where that cannot be."""
        await self._dispatcher.start()
        self._replicas()

    async def submit(self, request: frames.Add) -> Stream:
        """Send a request, and return the stream of what comes of it once a replica has taken it.

        Raises RefusedError where none can serve it, NotReadyError where there is none for too long,
        EngineDeadError where too many were lost.
        """
        if self._closed:
            raise NotReadyError("closed", "the server is shutting down")
        number = next(self._numbers)
        asked = msgspec.structs.replace(request, id=str(number))
        stream = Stream(asked.id, asked, self._abort)
        self._running[asked.id] = asyncio.ensure_future(
            self._run(with_seed(asked, self._seed, number), stream)
        )
        try:
            await stream.reply()
        except BaseException:
            stream.close()
            self._abort(asked.id)
            raise
        return stream

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter on all replicas."""
        with _replicas_needed():
            await self._dispatcher.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter on all replicas."""
        with _replicas_needed():
            await self._dispatcher.unload_adapter(name)

    async def block_map(self) -> frames.Blocks:
        """The blocks of all replicas."""
        with _replicas_needed():
            return blocks_of(await self._dispatcher.block_maps())

    async def close(self) -> None:
        """Let go of the replicas; what they run for this fleet ends."""
        self._closed = True
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._dispatcher.close()

    def _replicas(self) -> list[ReplicaStatus]:
        """Those that are there or, where there are none, those that were."""
        self._known = list(self._dispatcher.replicas.values()) or self._known
        return self._known

    def _abort(self, request_id: str) -> None:
        if task := self._running.pop(request_id, None):
            task.cancel()

    async def _run(self, asked: frames.Add, stream: Stream) -> None:
        """Put in the stream what comes of a request, up to its end or to an error."""
        try:
            async with aclosing(self._events(asked)) as events:
                async for event in events:
                    stream.put(event)
        except EngineError as error:
            stream.put(error)
        except asyncio.CancelledError:
            if self._closed:
                stream.put(NotReadyError("closed", "the server is shutting down"))
            raise
        except Exception as error:
            log.error("a request failed in the fleet", exc_info=error)
            stream.put(EngineDeadError(f"{type(error).__name__}: {error}"))
        finally:
            self._running.pop(asked.id, None)

    async def _events(
        self, asked: frames.Add
    ) -> AsyncGenerator[frames.Accepted | frames.StepOutput | frames.Ended]:
        """What comes of a request, on one replica after the other if need be."""
        request, is_accepted = Resumable(asked), False
        waiting_since: float | None = None
        while True:
            try:
                async with (
                    self._suspects.turn(asked),
                    aclosing(self._dispatcher.generate(request.asked())) as events,
                ):
                    async for event in events:
                        match event:
                            case frames.Accepted():
                                waiting_since = None
                                if not is_accepted:
                                    yield event
                                is_accepted = True
                            case frames.StepOutput():
                                if news := request.tell(event):
                                    yield news
                            case frames.Ended(error=frames.Refused(kind="closed", message=why)):
                                raise ReplicaLostError("", why)
                            case frames.Ended():
                                self._suspects.ended_well(asked)
                                yield request.end(event)
                                return
                    raise ReplicaLostError("", "it ended in the middle of an answer")
            except ReplicaLostError as error:
                self._lost(request, asked, error)
                if ended := request.end_of_all():
                    yield ended
                    return
            except NoReplicaError:
                waiting_since = await self._wait(waiting_since, request)

    def _lost(self, request: Resumable, asked: frames.Add, error: ReplicaLostError) -> None:
        """Note that a replica went away under a request. Raises EngineDeadError where that happened
        too often.
        """
        request.losses += 1
        if error.boot_id:
            self._suspects.died_under(asked, error.boot_id)
        if request.losses > _MOST_LOSSES:
            raise EngineDeadError(
                f"{request.losses} replicas went away under the request, the last of them "
                f"because: {error}"
            ) from None
        log.warning("a replica went away under a request, which goes on elsewhere: %s", error)

    async def _wait(self, since: float | None, request: Resumable) -> float:
        """Wait a little for a replica, where there has been none `since`. Raises NotReadyError
        where that has been so for too long.
        """
        since = monotonic() if since is None else since
        left = request.seconds_left
        if monotonic() - since >= self._wait_seconds or (left is not None and left < _POLL):
            raise NotReadyError("no_replica", "no worker is there that could take the request")
        await asyncio.sleep(_POLL)
        return since


@contextmanager
def _replicas_needed() -> Iterator[None]:
    """Raise NotReadyError where a replica is not there that must do something."""
    try:
        yield
    except NoReplicaError as error:
        raise NotReadyError("no_replica", str(error)) from None
