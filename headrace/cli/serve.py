"""Serve a model over HTTP, to clients of OpenAI's API.

It listens on this machine alone, unless --host says otherwise, which needs an --api-key. Ctrl-C or
SIGTERM ends it: requests under way have --drain-seconds to end, and a second signal ends them at
once.
"""

import argparse
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import (
    PARALLEL,
    add_activations,
    add_backend,
    add_kv_dtype,
    add_parallel,
    add_threads,
)
from headrace.cli.server_flags import add_server, announce, check_installed, settings_of
from headrace.config import EngineConfig
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.remote.start import StartedEngine
    from headrace.server.settings import Settings

_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}
_ENGINE_OPTIONS = (
    *(
        "backend",
        "threads",
        "kv_dtype",
        "activations",
        "max_model_len",
        "max_num_seqs",
        "kv_blocks",
        "kv_offload_bytes",
    ),
    *("chunked_prefill_size", "queue_timeout", "proposer", "draft_model"),
    *PARALLEL,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    limits = add_server(parser)
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a LoRA adapter, which clients name in place of the model",
    )
    parser.add_argument(
        "--worker",
        action="store_true",
        help="routes for `headrace route`, which is trusted: see docs/use/scale_out.md",
    )
    limits.add_argument(
        "--queue-timeout",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds that one may wait to begin; 0: no limit",
    )
    limits.add_argument(
        "--stall-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="of one step, after which the engine is restarted",
    )
    several = parser.add_argument_group("replicas, on Ray")
    several.add_argument(
        "--replicas",
        type=int,
        default=0,
        metavar="N",
        help="engines, each a process; 0: one, without Ray",
    )
    several.add_argument(
        "--max-replicas",
        type=int,
        default=0,
        metavar="N",
        help="as many as requests need; 0: no more than --replicas",
    )
    several.add_argument(
        "--scale-up-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="of too few replicas before there are more",
    )
    several.add_argument(
        "--scale-down-seconds", type=float, default=120.0, metavar="S", help="the same for too many"
    )
    engine = parser.add_argument_group("engine")
    add_backend(engine)
    add_threads(engine)
    add_kv_dtype(engine)
    add_activations(engine)
    _add(engine, "max_model_len", "longest sequence, in tokens; 0: the model's whole context", int)
    _add(engine, "max_num_seqs", "most sequences in one step (64; 256 on a GPU)", int)
    _add(engine, "kv_blocks", "blocks of KV; 0: what these need, within half of the memory", int)
    _add(
        engine,
        "kv_offload_bytes",
        "bytes of the host's memory for KV that a GPU has no blocks for; 0: none",
        int,
    )
    _add(
        engine,
        "chunked_prefill_size",
        "prompt tokens in a step that also decodes (16; 256 on a GPU)",
        int,
    )
    _add(engine, "proposer", "what drafts: off, auto, ngram, ...; never changes a token", str)
    _add(engine, "draft_model", "for draft_model: a smaller model with the same vocabulary", str)
    add_parallel(parser)


def _add(group: Any, name: str, text: str, kind: type) -> None:
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=kind,
        metavar="N" if kind is int else "NAME",
        default=_DEFAULTS[name],
        help=text,
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    check_installed()
    if args.replicas or args.max_replicas:
        return _serve_replicas(args)
    follow_where_not_first(args)
    from headrace.remote.start import starting_engine

    with (
        starting_engine() as started
    ):  # before the imports of this process, so that both import at the same time
        return _serve(args, started)


def _serve(args: argparse.Namespace, started: "StartedEngine") -> int:
    from headrace.remote.client import EngineClient
    from headrace.server.serving import serve

    config, settings, adapters = _options(args), _settings(args), _adapters(args.lora)
    return serve(
        args.model,
        config,
        settings,
        lambda: EngineClient(args.model, config, adapters, settings.stall_seconds, started),
        announce,
    )


def _serve_replicas(args: argparse.Namespace) -> int:
    least, most = max(1, args.replicas), max(1, args.replicas, args.max_replicas)
    if min(args.replicas, args.max_replicas) < 0 or 0 < args.max_replicas < least:
        raise RequestError(
            "--max-replicas must be no less than --replicas, or 0, not "
            f"{args.max_replicas} with {args.replicas}"
        )
    if args.worker:
        raise RequestError(
            "--worker is for one engine behind `headrace route`: leave it out, or --replicas"
        )
    check_installed("several replicas", "ray", "ray")
    from headrace.scaleout.ray_cluster import Scale
    from headrace.scaleout.ray_serve import serve_replicas

    scale = Scale(
        replicas=least,
        max_replicas=most,
        up_seconds=args.scale_up_seconds,
        down_seconds=args.scale_down_seconds,
    )
    said = (
        f"replicas  {least}{f' to {most}' if most > least else ''}, on "
        f"{os.environ.get('RAY_ADDRESS') or 'Ray on this machine'}"
    )
    return serve_replicas(
        args.model,
        _options(args),
        _settings(args),
        _adapters(args.lora),
        scale,
        lambda served, port: announce(served, port, said),
    )


def follow_where_not_first(args: argparse.Namespace) -> None:
    """Before this process serves: it may be another rank than the first
    (`loader.ranks.follow_if_not_rank_0`).
    """
    sizes = {name: getattr(args, name) for name in PARALLEL}
    if sizes != {name: _DEFAULTS[name] for name in PARALLEL}:
        from headrace.loader import options, ranks

        ranks.follow_if_not_rank_0(options.engine_config(sizes))


def _options(args: argparse.Namespace) -> EngineConfig:
    from headrace.loader.options import engine_config

    return engine_config({name: getattr(args, name) for name in _ENGINE_OPTIONS})


def _settings(args: argparse.Namespace) -> "Settings":
    return settings_of(args, stall_seconds=args.stall_seconds, worker=args.worker)


def _adapters(given: list[str]) -> dict[str, str]:
    adapters: dict[str, str] = {}
    for lora in given:
        name, _, path = lora.partition("=")
        if not name or not path or name in adapters:
            raise RequestError(
                f"--lora takes a name of its own and a path, NAME=PATH, not {lora!r}"
            )
        adapters[name] = path
    return adapters
