"""Arguments, settings and the first output of the commands that serve: `serve` and `route`."""

import argparse
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace.backend_traits import traits_of
from headrace.cli.arguments import (
    MAX_COUNT,
    MAX_SECONDS,
    Arguments,
    add_chat_template,
    add_model,
    add_price,
    add_sanitize_control_tokens,
    add_seed,
    add_strict_schemas,
    number,
    whole_number,
)
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.server.settings import Settings
    from headrace.server.state import ServerState

_SERVER_PACKAGES = ("msgspec", "prometheus_client", "uvicorn", "httptools")


def add_server(parser: argparse.ArgumentParser) -> Arguments:
    """Returns the group of limits."""
    add_model(parser, optional=True)
    add_price(parser, "the machine of an engine")
    _add_network(parser.add_argument_group("network"))
    _add_model_options(parser.add_argument_group("model"))
    limits = parser.add_argument_group("limits")
    _add_limits(limits)
    _add_logging(parser.add_argument_group("logging"))
    return limits


def _add_network(group: Arguments) -> None:
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; any other than this machine needs an --api-key",
    )
    group.add_argument(
        "--port",
        type=whole_number(0, 65535),
        default=8000,
        metavar="N",
        help="port to listen on; 0: any free port",
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key that requests must send; may be repeated; HEADRACE_API_KEY adds one",
    )
    group.add_argument(
        "--allowed-origins",
        default="",
        metavar="ORIGIN,...",
        help="origins of other web pages that may use the server, or *; also as JSON",
    )


def _add_model_options(group: Arguments) -> None:
    group.add_argument(
        "--model-name", metavar="NAME", help="name of the model for clients (default: from MODEL)"
    )
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="format of the model's tool calls, or `none` (default: from its chat template)",
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="format of the model's reasoning, or `none` (default: from its chat template)",
    )
    group.add_argument(
        "--ignore-advised-sampling",
        action="store_true",
        help="no sampling defaults from the model's generation_config.json",
    )
    add_seed(group, None, "base seed for requests without one (default: random at each start)")
    add_chat_template(group)
    add_sanitize_control_tokens(group)
    add_strict_schemas(group)
    group.add_argument(
        "--allow-adapter-changes",
        action="store_true",
        help="routes that load and unload LoRA adapters",
    )


def _add_limits(group: Arguments) -> None:
    group.add_argument(
        "--max-waiting",
        type=whole_number(0, MAX_COUNT),
        default=256,
        metavar="N",
        help="maximum waiting sequences; further requests get status 503",
    )
    group.add_argument(
        "--max-per-key",
        type=whole_number(0, MAX_COUNT),
        default=0,
        metavar="N",
        help="maximum concurrent requests of one API key; 0: no limit",
    )
    group.add_argument(
        "--max-sessions",
        type=whole_number(0, MAX_COUNT),
        default=16,
        metavar="N",
        help="maximum open sessions of one API key; 0: sessions are refused",
    )
    seconds = {
        "--request-timeout": (600.0, "maximum seconds of a request"),
        "--receive-timeout": (60.0, "maximum seconds to receive the head, then the body"),
        "--send-timeout": (60.0, "maximum seconds until the client reads more of a response"),
        "--drain-seconds": (30.0, "maximum seconds for open requests when the server ends"),
    }
    for flag, (default, text) in seconds.items():
        group.add_argument(
            flag, type=number(0, MAX_SECONDS), default=default, metavar="S", help=text
        )


def _add_logging(group: Arguments) -> None:
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="format of the log on stderr"
    )
    group.add_argument(
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="collector of OpenTelemetry spans, such as http://HOST:4318/v1/traces",
    )


def settings_of(
    args: argparse.Namespace, *, stall_seconds: float = 60.0, worker: bool = False
) -> "Settings":
    """Also starts the log on stderr."""
    from headrace.server.cors import read_origins
    from headrace.server.serving import stderr_log
    from headrace.server.settings import Settings

    stderr_log(args.log_format)
    keys = (*args.api_key, os.environ.get("HEADRACE_API_KEY", ""))
    return Settings(
        host=args.host,
        port=args.port,
        api_keys=tuple(key for key in keys if key),
        allowed_origins=read_origins(args.allowed_origins) if args.allowed_origins else (),
        model_name=args.model_name or model_name(args.model),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        ignore_advised_sampling=args.ignore_advised_sampling,
        sanitize_control_tokens=args.sanitize_control_tokens,
        strict_schemas=args.strict_schemas,
        allow_adapter_changes=args.allow_adapter_changes,
        max_waiting=args.max_waiting,
        max_per_key=args.max_per_key,
        max_sessions=args.max_sessions,
        request_timeout=args.request_timeout,
        receive_timeout=args.receive_timeout,
        send_timeout=args.send_timeout,
        drain_seconds=args.drain_seconds,
        otlp_endpoint=args.otlp_endpoint,
        price=args.price,
        stall_seconds=stall_seconds,
        worker=worker,
    )


def check_installed(feature: str = "the server", extra: str = "server", *packages: str) -> None:
    """Raise RequestError if a package of a server is missing; `extra` installs it."""
    check_packages(feature, extra, (*_SERVER_PACKAGES, *packages))


def check_packages(feature: str, extra: str, packages: Iterable[str]) -> None:
    """Raise RequestError if a package is missing; `extra` installs it."""
    for package in packages:
        if find_spec(package) is None:
            raise RequestError(
                f"{feature} needs the package {package}: pip install 'headrace[{extra}]'"
            )


def model_name(model: str) -> str:
    return os.path.basename(model.rstrip("/")) or model


def announce(state: "ServerState", port: int, *lines: str) -> None:
    """Print the model, its limits and an example request on stderr."""
    info, settings = state.engine.info, state.settings
    assert info is not None, "the engine has started"
    threads = "" if traits_of(info.backend).on_gpu else f", {info.threads} threads"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{port}"
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    message = '{"role": "user", "content": "Hello!"}'
    body = f'{{"model": "{settings.model_name}", "messages": [{message}]}}'

    figures = [f"model     {settings.model_name} ({info.architecture}), {info.backend}{threads}"]
    if info.lossy:
        figures.append(f"lossy     {info.lossy}")
        figures.append(f"          {info.mode_price}")
    figures += [
        f"memory    {info.weight_bytes / 1e6:,.0f} MB of weights, "
        f"{info.kv_bytes / 1e6:,.0f} MB of KV in {info.kv_dtype}",
        f"context   {info.max_model_len:,} tokens; KV for {info.kv_tokens:,}, at most "
        f"{info.max_num_seqs:,} sequences at once",
    ]
    if state.advised_sampling:
        advised = ", ".join(f"{name} {value:g}" for name, value in state.advised_sampling.items())
        figures.append(f"sampling  {advised} by default, as the model's authors advise")
    if state.output_format.is_generic and state.prompt_reader.templates:
        figures.append("tools     in a generic format, because the chat template has none")
    figures += [
        *lines,
        f"address   {url}/v1{'' if settings.api_keys else ' (no key needed, this machine only)'}",
        f"try       curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d '{body}'",
    ]
    print("\n".join(figures), file=sys.stderr, flush=True)
