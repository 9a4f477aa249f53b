"""Requests in progress, and which of them gives its place to a more urgent one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from headrace.remote.errors import NotReadyError
from headrace.remote.stream import Stream

_TURNED_AWAY = (
    "the queue is full, and a more urgent request has taken the place of this one; send the "
    "request again later"
)


@dataclass(eq=False)
class Admission:
    """A request in progress."""

    num_sequences: int
    priority: int | None
    """As in `RequestOptions`; None: it keeps its place, and takes no place of others."""
    streams: list[Stream] = field(default_factory=list)
    was_turned_away: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether the request has no token yet."""
        return not any(stream.tokens_by_output or stream.ended for stream in self.streams)

    def check(self) -> None:
        """Raise NotReadyError if another request has taken the place of this one."""
        if self.was_turned_away:
            raise NotReadyError("full", _TURNED_AWAY)

    def turn_away(self) -> None:
        """End the request with NotReadyError, at its next event or check."""
        self.was_turned_away = True
        for stream in self.streams:
            stream.fail(NotReadyError("full", _TURNED_AWAY))


class Admissions:
    """Admits requests up to a number of sequences."""

    def __init__(self) -> None:
        self.num_sequences = 0
        self._admitted: list[Admission] = []
        """In the order of arrival."""

    @contextmanager
    def admit(self, num_sequences: int, priority: int | None, limit: int) -> Iterator[Admission]:
        """Count a request as in progress. Raises NotReadyError as `victims` does."""
        for victim in self.victims(num_sequences, priority, limit):
            self._release(victim)
            victim.turn_away()
        admission = Admission(num_sequences, priority)
        self.num_sequences += num_sequences
        self._admitted.append(admission)
        try:
            yield admission
        finally:
            if not admission.was_turned_away:
                self._release(admission)

    def _release(self, admission: Admission) -> None:
        self.num_sequences -= admission.num_sequences
        self._admitted.remove(admission)

    def victims(self, num_sequences: int, priority: int | None, limit: int) -> list[Admission]:
        """The waiting requests whose places a request needs, if it exceeds the limit.

        They have a higher `priority`: the least urgent ones, and of these the last to come. Raises
        NotReadyError if all such requests have too few sequences.
        """
        needed = self.num_sequences + num_sequences - limit
        if needed <= 0:
            return []
        victims: list[Admission] = []
        waiting = [
            (item.priority, number, item)
            for number, item in enumerate(self._admitted)
            if priority is not None
            and item.priority is not None
            and item.priority > priority
            and item.is_waiting
        ]
        for _, _, item in sorted(waiting, key=lambda entry: entry[:2], reverse=True):
            victims.append(item)
            needed -= item.num_sequences
            if needed <= 0:
                return victims
        raise NotReadyError("full", "the queue is full; send the request again later")
