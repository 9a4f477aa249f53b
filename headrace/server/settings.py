"""The operator's options of the server."""

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Keys of which every request must send one; if empty, no key is needed."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose web pages may use the server, in lower case; `*` for all."""
    model_name: str = ""
    max_body_bytes: int = 16 << 20
    max_waiting: int = 256
    """Maximum number of waiting sequences; further requests get status 503."""
    max_per_key: int = 0
    """Maximum number of concurrent requests per API key, 0 for no limit; more get status 429."""
    max_sessions: int = 16
    """Maximum number of open sessions per API key, above which another gets status 429."""
    request_timeout: float = 600.0
    """Maximum seconds per request, after which it gets status 504."""
    receive_timeout: float = 60.0
    """Maximum seconds for receiving the head of a request, and again for its body."""
    send_timeout: float = 60.0
    """Seconds after which a connection is closed if its client reads nothing."""
    stall_seconds: float = 60.0
    """Maximum seconds per step, after which the engine is restarted."""
    drain_seconds: float = 30.0
    """Maximum seconds to finish requests in progress at shutdown."""
    keepalive_seconds: float = 15.0
    """Seconds without an event after which a stream sends a comment, to keep proxies connected."""
    otlp_endpoint: str = ""
    """URL of an OpenTelemetry collector (OTLP over HTTP); if empty, no spans are sent."""
    tool_call_parser: str | None = None
    """Name of the model's tool-call format; None detects it from the chat template."""
    reasoning_parser: str | None = None
    """Name of the model's reasoning format; None detects it from the chat template."""
    ignore_advised_sampling: bool = False
    """Whether OpenAI's sampling defaults replace the model authors' advice."""
    sanitize_control_tokens: bool = True
    """Whether control tokens in messages and tools stay text."""
    strict_schemas: bool = True
    """Whether a schema keyword that no grammar enforces is an error, if a request does not say."""
    price: float | None = None
    """Dollars an hour of the machine."""
    worker: bool = False
    """Whether to serve the routes for a frontend, which chooses the scopes of the prefix cache."""
    allow_adapter_changes: bool = False
    """Whether requests may load and unload adapters."""
