"""Errors that Headrace raises on purpose, with the exit codes of the `headrace` command."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.outputs import RequestOutput


class HeadraceError(Exception):
    """Base class of all Headrace errors."""

    exit_code = 1
    """Exit code of the `headrace` command."""
    advice = ""
    """Next step for the user, if a message has none of its own after a semicolon."""

    @property
    def reason(self) -> str:
        """The message without the advice of its class."""
        return super().__str__()

    def __str__(self) -> str:
        reason = self.reason
        return reason if not self.advice or ";" in reason else f"{reason}; {self.advice}"


class RequestError(HeadraceError, ValueError):
    """A request or an option is invalid: out of range, too long or contradictory. Exit code 2."""

    exit_code = 2


class ModelError(HeadraceError):
    """The model is missing, malformed or not supported. Exit code 3."""

    exit_code = 3


class ModelNotFoundError(ModelError):
    """No file, alias or package has this name. Exit code 3."""

    advice = "check the name or path, or list the aliases with `headrace ls`"


class FormatError(ModelError):
    """A model file is malformed: truncated, out of bounds or inconsistent. Exit code 3."""

    advice = "download the file again, or correct it if you made it"


class UnsupportedModelError(ModelError):
    """The model is well-formed, but its architecture, tensor type or feature is not
    supported. Exit code 3.
    """

    advice = (
        "take another version of the model (GGUF, or safetensors without quantisation), or a "
        "family from the page Models"
    )


class ChecksumError(ModelError):
    """The SHA-256 of a download differs from the pinned one; the file is deleted. Exit code 3."""


class CacheError(HeadraceError):
    """The download folder is not writable. Exit code 1."""


class MemoryLimitError(HeadraceError):
    """The model or its KV cache does not fit in memory; the message shows the sum. Exit code 4."""

    exit_code = 4


class ClosedError(HeadraceError):
    """The engine was used after `close()`. Exit code 1."""


class RankLostError(HeadraceError):
    """The process of a rank ended or stopped responding; the engine restarts it. Exit code 1."""


class RankFailedError(HeadraceError):
    """A step or an adapter failed on a rank other than 0; only this request fails. Exit code 1."""


class DeviceLostError(HeadraceError):
    """The GPU failed, and this process cannot use it again: after an illegal memory access or an
    error of its memory. The server starts another engine process. Exit code 1.
    """


class NoReplicaError(HeadraceError):
    """No replica can take the request. Exit code 1."""


class ReplicasFullError(NoReplicaError):
    """All replicas that could take the request have full queues. Exit code 1."""


class AuditError(HeadraceError):
    """A server could not be audited: it does not answer, refuses the key, or fails. Exit code 2."""

    exit_code = 2


class NonFiniteLogitsError(HeadraceError):
    """The model produced NaN or infinity; only the affected request fails. Exit code 1."""


class ConstraintError(HeadraceError):
    """The grammar allows no next token, or its check takes too long; only this request
    fails. Exit code 1.
    """

    advice = "simplify the schema or grammar"


class RequestFailedError(HeadraceError):
    """Requests failed while they ran. Exit code 1."""

    outputs: "list[RequestOutput]"
    """Results of all requests of the call, complete ones included."""

    def __init__(self, message: str, outputs: "list[RequestOutput]") -> None:
        super().__init__(message)
        self.outputs = outputs
