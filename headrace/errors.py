"""Every error Headrace raises on purpose, each with the exit code the command line gives it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.outputs import RequestOutput


class HeadraceError(Exception):
    """Base of all errors of our own. `exit_code` is what `headrace` exits with."""

    exit_code = 1


class RequestError(HeadraceError, ValueError):
    """A request or an option that cannot be served as written: out of range, too long,
    contradictory.
    """

    exit_code = 2


class ModelError(HeadraceError):
    """The model is missing, malformed or of a kind that Headrace does not know."""

    exit_code = 3


class ModelNotFoundError(ModelError):
    """No such file, alias or package."""


class FormatError(ModelError):
    """A model file that breaks its format: truncated, out of bounds, inconsistent."""


class UnsupportedModelError(ModelError):
    """A well-formed model of an architecture, tensor type or feature that Headrace does not
    know.
    """


class ChecksumError(ModelError):
    """A download whose SHA-256 is not the pinned one; nothing of it is kept."""


class CacheError(HeadraceError):
    """The folder of downloads cannot be written."""


class MemoryLimitError(HeadraceError):
    """The model or its KV cache does not fit in memory; the message gives the arithmetic."""

    exit_code = 4


class ClosedError(HeadraceError):
    """The engine was used after `close()`."""


class RankLostError(HeadraceError):
    """A process that runs a part of the model ended, or does not answer; those that are left start
    it again.
    """


class NoReplicaError(HeadraceError):
    """No replica is there that could take a request."""


class NonFiniteLogitsError(HeadraceError):
    """The model computed NaN or infinity; the request that met it fails alone."""


class ConstraintError(HeadraceError):
    """No token can follow in an output by its own rules, or it takes too long to find out which;
    its request fails alone.
    """


class RequestFailedError(HeadraceError):
    """Requests that failed while they ran. `outputs` has the results of all, the whole ones
    included.
    """

    def __init__(self, message: str, outputs: "list[RequestOutput]") -> None:
        super().__init__(message)
        self.outputs = outputs
