"""Errors of an engine that runs in another process."""

from headrace.errors import HeadraceError
from headrace.remote.frames import ErrorKind


class EngineError(HeadraceError):
    """A request cannot go on."""


class RefusedError(EngineError):
    """The engine cannot serve the request as it is."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NotReadyError(EngineError):
    """There is no engine that could take the request now."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message or f"the engine is {state}")
        self.state = state


class EngineDeadError(EngineError):
    """The engine ended under the request, or could not start."""


class EngineStartError(HeadraceError):
    """The engine could not be started; the exit code is the engine process's own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class TooSlowError(EngineError):
    """The client reads slower than its answer is written."""
