"""Serve a model over HTTP, to clients of OpenAI's API.

It listens on this machine alone, unless --host says otherwise, which needs an --api-key. Ctrl-C or SIGTERM ends it: requests
under way have --drain-seconds to end, and a second signal ends them at once.
"""

import argparse
import os
import sys
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import PARALLEL, add_activations, add_kv_dtype, add_model, add_parallel, add_threads
from headrace.config import EngineConfig
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.server.engine_start import StartedEngine
    from headrace.server.served_model import ServedModel

_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}
_ENGINE_OPTIONS = (
    *("threads", "kv_dtype", "activations", "max_model_len", "max_num_seqs", "kv_blocks", "chunked_prefill_size", "queue_timeout"),
    *("proposer", "draft_model"),
    *PARALLEL,
)
_SETTINGS = (
    "host",
    "port",
    "max_waiting",
    "max_per_key",
    "request_timeout",
    "receive_timeout",
    "send_timeout",
    "drain_seconds",
    "stall_seconds",
    "otlp_endpoint",
    "ignore_advised_sampling",
    "tool_call_parser",
    "reasoning_parser",
    "allow_adapter_changes",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_model(parser, optional=True)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0: any that is free")
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="what requests must bring; HEADRACE_API_KEY has one as well"
    )
    parser.add_argument("--model-name", metavar="NAME", help="what clients call the model; MODEL if left out")
    parser.add_argument(
        "--lora", action="append", default=[], metavar="NAME=PATH", help="a LoRA adapter, which clients name in place of the model"
    )
    parser.add_argument(
        "--tool-call-parser", metavar="NAME", help="how the model writes calls of tools; by its template if left out, or none"
    )
    parser.add_argument("--reasoning-parser", metavar="NAME", help="how it writes its reasoning; by its template if left out, or none")
    parser.add_argument(
        "--ignore-advised-sampling", action="store_true", help="leave alone what generation_config.json says of temperature and the like"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-waiting", type=int, default=256, metavar="N", help="sequences that may wait; beyond that requests get 503")
    limits.add_argument("--max-per-key", type=int, default=0, metavar="N", help="requests of one key at a time; 0: no limit")
    limits.add_argument("--request-timeout", type=float, default=600.0, metavar="S", help="seconds after which a request ends")
    limits.add_argument("--queue-timeout", type=float, default=0.0, metavar="S", help="seconds that one may wait to begin; 0: no limit")
    limits.add_argument("--receive-timeout", type=float, default=60.0, metavar="S", help="for a client to send the head, then the body")
    limits.add_argument(
        "--send-timeout", type=float, default=60.0, metavar="S", help="after which a client that takes nothing of its answer is cut off"
    )
    limits.add_argument("--drain-seconds", type=float, default=30.0, metavar="S", help="for requests under way when the server ends")
    limits.add_argument("--stall-seconds", type=float, default=60.0, metavar="S", help="of one step, after which the engine is restarted")
    limits.add_argument("--allow-adapter-changes", action="store_true", help="routes that load and unload adapters")
    watching = parser.add_argument_group("watching")
    watching.add_argument("--log-format", choices=("text", "json"), default="text", help="of the log on stderr")
    watching.add_argument("--otlp-endpoint", default="", metavar="URL", help="where OpenTelemetry spans go: http://HOST:4318/v1/traces")
    engine = parser.add_argument_group("engine")
    add_threads(engine)
    add_kv_dtype(engine)
    add_activations(engine)
    _add(engine, "max_model_len", "longest sequence, in tokens; 0: the model's whole context", int)
    _add(engine, "max_num_seqs", "most sequences in one step", int)
    _add(engine, "kv_blocks", "blocks of KV; 0: what these need, within half of the memory", int)
    _add(engine, "chunked_prefill_size", "prompt tokens in a step that also decodes", int)
    _add(engine, "proposer", "what drafts: off, auto, ngram, ...; never changes a token", str)
    _add(engine, "draft_model", "for draft_model: a smaller model with the same vocabulary", str)
    add_parallel(parser)


def _add(group: Any, name: str, text: str, kind: type) -> None:
    group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "NAME", default=_DEFAULTS[name], help=text)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    check_installed()
    follow_where_not_first(args)
    from headrace.server.engine_start import starting_engine

    with starting_engine() as started:  # before the imports of this process, so that both import at the same time
        return _serve(args, started)


def _serve(args: argparse.Namespace, started: "StartedEngine") -> int:
    from headrace.assembly.options import engine_config
    from headrace.server.serving import serve, stderr_log
    from headrace.server.settings import Settings

    keys = tuple(key for key in (*args.api_key, os.environ.get("HEADRACE_API_KEY", "")) if key)
    settings = Settings(
        api_keys=keys, model_name=args.model_name or model_name(args.model), **{name: getattr(args, name) for name in _SETTINGS}
    )
    config = engine_config({name: getattr(args, name) for name in _ENGINE_OPTIONS})
    stderr_log(args.log_format)
    return serve(args.model, config, settings, _adapters(args.lora), started, _announce)


def follow_where_not_first(args: argparse.Namespace) -> None:
    """Before this process serves: it may be another rank than the first (`assembly.ranks.follow_where_not_first`)."""
    sizes = {name: getattr(args, name) for name in PARALLEL}
    if sizes != {name: _DEFAULTS[name] for name in PARALLEL}:
        from headrace.assembly import options, ranks

        ranks.follow_where_not_first(options.engine_config(sizes))


def check_installed() -> None:
    """Raise RequestError where the packages that the server needs are missing."""
    for package in ("msgspec", "prometheus_client", "uvicorn", "httptools"):
        if find_spec(package) is None:
            raise RequestError(f"the server needs the package {package}: pip install 'headrace[server]'")


def model_name(model: str) -> str:
    """The last part of a path; what is no path stands as it is."""
    return os.path.basename(model.rstrip("/")) or model


def _adapters(given: list[str]) -> dict[str, str]:
    adapters: dict[str, str] = {}
    for lora in given:
        name, _, path = lora.partition("=")
        if not name or not path or name in adapters:
            raise RequestError(f"--lora takes a name of its own and a path, NAME=PATH, not {lora!r}")
        adapters[name] = path
    return adapters


def _announce(served: "ServedModel", port: int) -> None:
    """Say what is served, and how to ask."""
    hello, settings = served.engine.hello, served.settings
    assert hello is not None
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{port}"
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    body = f'{{"model": "{settings.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    lines = [
        f"model     {settings.model_name} ({hello.architecture}), {hello.backend}, {hello.threads} threads",
        f"memory    {hello.weight_bytes / 1e6:,.0f} MB of weights, {hello.kv_bytes / 1e6:,.0f} MB of KV in {hello.kv_dtype}",
        f"context   {hello.max_model_len:,} tokens; KV for {hello.kv_tokens:,}, at most {hello.max_num_seqs:,} sequences at once",
        f"address   {url}/v1{'' if settings.api_keys else ' (no key needed, this machine only)'}",
        f"try       curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'",
    ]
    if served.advised_sampling:
        advised = ", ".join(f"{name} {value:g}" for name, value in served.advised_sampling.items())
        lines.insert(3, f"sampling  {advised}, unless a request says otherwise: as the model's authors advise")
    if hello.lossy:
        lines.insert(1, f"lossy     {hello.lossy}")
    print("\n".join(lines), file=sys.stderr, flush=True)
