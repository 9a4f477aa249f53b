from headrace.errors import HeadraceError
from headrace.remote.frames import ErrorKind


class EngineError(HeadraceError):
    """A request cannot continue."""


class RefusedError(EngineError):
    """The engine cannot serve the request."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NotReadyError(EngineError):
    """No engine can accept the request now."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message or f"the engine is {state}")
        self.state = state


class EngineDeadError(EngineError):
    """The engine ended during the request, or could not start."""


class EngineStartError(HeadraceError):
    """The engine could not start. The exit code is the exit code of the engine process."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class TooSlowError(EngineError):
    """The client reads slower than the engine generates."""
