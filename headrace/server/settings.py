"""What an operator decides about the server."""

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How the server listens, which clients it serves, and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Every request must bring one of them; none: all that reach the address are served."""
    model_name: str = ""
    """What clients call the model."""
    max_body_bytes: int = 16 << 20
    max_waiting: int = 256
    """Sequences that may wait beyond those that run; a request that would make more gets 503."""
    max_per_key: int = 0
    """Requests of one key at the same time; one more gets 429. 0: no limit."""
    request_timeout: float = 600.0
    """Seconds after which a request ends with 504."""
    receive_timeout: float = 60.0
    """Seconds in which a client must have sent the head of a request, and then its body."""
    send_timeout: float = 60.0
    """Seconds for which a client may take nothing of what is sent to it before its connection is
    cut.
    """
    stall_seconds: float = 60.0
    """Seconds that a step may take before the engine is taken to hang, and started again."""
    drain_seconds: float = 30.0
    """Seconds that requests under way have when the server is asked to end."""
    keepalive_seconds: float = 15.0
    """Seconds without news after which a stream gets a comment, so that no proxy takes it for dead.
    """
    otlp_endpoint: str = ""
    """Where OpenTelemetry spans go, the whole URL of OTLP over HTTP; empty: nowhere."""
    tool_call_parser: str | None = None
    """How the model writes calls of tools; None: by its chat template."""
    reasoning_parser: str | None = None
    """How it writes its reasoning; None: by its chat template."""
    ignore_advised_sampling: bool = False
    """Whether requests that leave sampling parameters out have OpenAI's, and not those that the
    model's authors advise.
    """
    worker: bool = False
    """Whether there are routes for a frontend, which chooses the scopes of the prefix cache."""
    allow_adapter_changes: bool = False
    """Whether there are routes that load and unload adapters."""
