"""What verbs that listen have in common: flags, settings, and what they say once they are ready."""

import argparse
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from headrace.backend_traits import traits_of
from headrace.cli.arguments import add_model
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.server.settings import Settings
    from headrace.server.state import ServerState

_SETTINGS = (
    *(
        "host",
        "port",
        "max_waiting",
        "max_per_key",
        "request_timeout",
        "receive_timeout",
        "send_timeout",
        "drain_seconds",
        "otlp_endpoint",
    ),
    *("ignore_advised_sampling", "tool_call_parser", "reasoning_parser", "allow_adapter_changes"),
)


def add_server(parser: argparse.ArgumentParser) -> Any:
    """Add the flags of a server, whatever engine is behind it; returns their group of limits, for
    more of them.
    """
    add_model(parser, optional=True)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0: any that is free")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="what requests must bring; HEADRACE_API_KEY has one as well",
    )
    parser.add_argument(
        "--model-name", metavar="NAME", help="what clients call the model; MODEL if left out"
    )
    parser.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes calls of tools; by its template if left out, or none",
    )
    parser.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="how it writes its reasoning; by its template if left out, or none",
    )
    parser.add_argument(
        "--ignore-advised-sampling",
        action="store_true",
        help="leave alone what generation_config.json says of temperature and the like",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="sequences that may wait; beyond that requests get 503",
    )
    limits.add_argument(
        "--max-per-key",
        type=int,
        default=0,
        metavar="N",
        help="requests of one key at a time; 0: no limit",
    )
    limits.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds after which a request ends",
    )
    limits.add_argument(
        "--receive-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="for a client to send the head, then the body",
    )
    limits.add_argument(
        "--send-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="after which a client that takes nothing of its answer is cut off",
    )
    limits.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="for requests under way when the server ends",
    )
    limits.add_argument(
        "--allow-adapter-changes", action="store_true", help="routes that load and unload adapters"
    )
    watching = parser.add_argument_group("watching")
    watching.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="of the log on stderr"
    )
    watching.add_argument(
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="where OpenTelemetry spans go: http://HOST:4318/v1/traces",
    )
    return limits


def settings_of(args: argparse.Namespace, **further: Any) -> "Settings":
    """The settings that the flags make, and further ones; the log goes to stderr from now on."""
    from headrace.server.serving import stderr_log
    from headrace.server.settings import Settings

    keys = tuple(key for key in (*args.api_key, os.environ.get("HEADRACE_API_KEY", "")) if key)
    stderr_log(args.log_format)
    chosen = {name: getattr(args, name) for name in _SETTINGS}
    return Settings(
        api_keys=keys, model_name=args.model_name or model_name(args.model), **chosen, **further
    )


def check_installed(what: str = "the server", extra: str = "server", *further: str) -> None:
    """Raise RequestError where packages that are needed for it are missing; `extra` brings them
    all.
    """
    for package in ("msgspec", "prometheus_client", "uvicorn", "httptools", *further):
        if find_spec(package) is None:
            raise RequestError(
                f"{what} needs the package {package}: pip install 'headrace[{extra}]'"
            )


def model_name(model: str) -> str:
    """The last part of a path; what is no path stands as it is."""
    return os.path.basename(model.rstrip("/")) or model


def announce(served: "ServerState", port: int, *more: str) -> None:
    """Say what is served, and how to ask; `more`: further lines."""
    hello, settings = served.engine.info, served.settings
    assert hello is not None
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{port}"
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    body = f'{{"model": "{settings.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    on_gpu = traits_of(hello.backend).on_gpu
    runs_on = hello.backend if on_gpu else f"{hello.backend}, {hello.threads} threads"
    lines = [
        f"model     {settings.model_name} ({hello.architecture}), {runs_on}",
        f"memory    {hello.weight_bytes / 1e6:,.0f} MB of weights, "
        f"{hello.kv_bytes / 1e6:,.0f} MB of KV in {hello.kv_dtype}",
        f"context   {hello.max_model_len:,} tokens; KV for {hello.kv_tokens:,}, at most "
        f"{hello.max_num_seqs:,} sequences at once",
        *more,
        f"address   {url}/v1{'' if settings.api_keys else ' (no key needed, this machine only)'}",
        f"try       curl {url}/v1/chat/completions -H 'Content-Type: "
        f"application/json'{key} -d '{body}'",
    ]
    if served.advised_sampling:
        advised = ", ".join(f"{name} {value:g}" for name, value in served.advised_sampling.items())
        lines.insert(
            3,
            f"sampling  {advised}, unless a request says otherwise: as the model's authors advise",
        )
    if hello.lossy:
        lines.insert(1, f"lossy     {hello.lossy}")
    print("\n".join(lines), file=sys.stderr, flush=True)
