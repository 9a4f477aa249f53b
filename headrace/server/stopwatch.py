"""The time of a request at the server, by its parts."""

from time import monotonic

from headrace.remote import frames


class Stopwatch:
    """Measures a request from its head on, in seconds."""

    def __init__(self) -> None:
        self._started = self._received = monotonic()
        self.tokenise: float = 0.0
        """From the body to the engine: JSON, schemas, template, tokens."""

    @property
    def seconds(self) -> float:
        return monotonic() - self._started

    def body_received(self) -> None:
        self._received = monotonic()

    def submitted(self) -> None:
        self.tokenise = monotonic() - self._received

    def parts(self, ended: frames.Ended) -> dict[str, float]:
        """Parts of the time until now. `network` is the rest after tokenising and the engine's
        parts: the body on its way, messages between processes, the response, other requests.
        """
        parts = {"tokenise": self.tokenise} | engine_parts(ended)
        return parts | {"network": max(0.0, self.seconds - sum(parts.values()))}


def engine_parts(ended: frames.Ended) -> dict[str, float]:
    """See `Timing`."""
    return {
        "queue": ended.queue,
        "prefill": ended.prefill,
        "decode": ended.decode,
        "detokenise": ended.detokenise,
    }
