"""Serve a model over HTTP to clients of OpenAI's API.

The server listens on this machine only; another --host needs an --api-key. Ctrl-C or SIGTERM ends
it: open requests get --drain-seconds to finish, and a second signal ends them immediately.
"""

import argparse
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import (
    MAX_COUNT,
    MAX_SECONDS,
    PARALLEL,
    ROPE,
    Arguments,
    add_activations,
    add_backend,
    add_kv_dtype,
    add_modes,
    add_parallel,
    add_rope,
    add_speculative_config,
    add_threads,
    number,
    whole_number,
)
from headrace.cli.server_arguments import add_server, announce, check_installed, settings_of
from headrace.config import LOSSY_OPTIONS, EngineConfig
from headrace.errors import RequestError

if TYPE_CHECKING:
    from headrace.remote.start import StartedEngine
    from headrace.server.settings import Settings

EXAMPLES = """\
  headrace serve smollm2
  headrace serve hf:ORG/MODEL --host 0.0.0.0 --api-key KEY --max-num-seqs 32
  headrace serve smollm2 --lora poet=adapters/poet --kv-dtype int8"""

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}
_ENGINE_OPTIONS = (
    "backend",
    "threads",
    "kv_dtype",
    "activations",
    "skip_zeros",
    "chat_template",
    "max_model_len",
    "max_num_seqs",
    "kv_blocks",
    "kv_offload_bytes",
    "kv_cache_dir",
    "kv_cache_dir_bytes",
    "chunked_prefill_size",
    "queue_timeout",
    "priority_scheduling_preemption_threshold",
    "seed",
    "proposer",
    "draft_model",
    "speculative_config",
    "learn_drafts",
    "learn_drafts_bytes",
    "learn_salted",
    *LOSSY_OPTIONS,
    *ROPE,
    *PARALLEL,
)


def configure(parser: argparse.ArgumentParser) -> None:
    limits = add_server(parser)
    limits.add_argument(
        "--queue-timeout",
        type=number(0, MAX_SECONDS),
        default=_DEFAULTS["queue_timeout"],
        metavar="S",
        help="maximum seconds that a request waits for its first step; 0: no limit",
    )
    limits.add_argument(
        "--stall-seconds",
        type=number(0.1, MAX_SECONDS),
        default=60.0,
        metavar="S",
        help="maximum seconds of a step, after which the engine is restarted",
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="LoRA adapter, which clients name in place of the model; may be repeated",
    )
    parser.add_argument(
        "--worker",
        action="store_true",
        help="routes for a trusted `headrace route`: see docs/use/scale_out.md",
    )
    compute = parser.add_argument_group("compute")
    add_backend(compute)
    add_threads(compute)
    add_activations(compute)
    _add_memory(parser.add_argument_group("memory and batching"))
    _add_speculation(parser.add_argument_group("speculative decoding"))
    add_modes(parser)
    add_rope(parser)
    add_parallel(parser)
    _add_replicas(parser.add_argument_group("replicas, on Ray"))


def _add_memory(group: Arguments) -> None:
    add_kv_dtype(group)
    texts = {
        "max_model_len": "maximum length of a sequence, in tokens; 0: the model's context",
        "max_num_seqs": "maximum sequences in a step (default: 64; 256 on a GPU)",
        "chunked_prefill_size": "prompt tokens in a step that also decodes (default: 16; 256 on a "
        "GPU)",
        "priority_scheduling_preemption_threshold": "minimum difference of priorities at which a "
        "waiting request preempts running ones, if that pays; 0: never",
        "kv_blocks": "number of KV blocks; 0: enough for --max-num-seqs sequences of "
        "--max-model-len tokens, within half of the memory, or 90%% of a GPU's",
        "kv_offload_bytes": "bytes of host memory for KV evicted from a GPU; 0: no offloading",
    }
    for name, text in texts.items():
        _add_engine_option(group, name, "N", int, text)
    text = "folder that keeps the KV of prompts and outputs for later runs (docs/use/kv_cache.md)"
    _add_engine_option(group, "kv_cache_dir", "FOLDER", str, text)
    text = "maximum bytes of the folder, for all models together"
    _add_engine_option(group, "kv_cache_dir_bytes", "N", int, text)


def _add_speculation(group: Arguments) -> None:
    text = "source of draft tokens: off, auto, suffix, ...; tokens stay the same"
    _add_engine_option(group, "proposer", "NAME", str, text)
    text = "smaller model, best with the same vocabulary (for the proposer draft_model)"
    _add_engine_option(group, "draft_model", "MODEL", str, text)
    add_speculative_config(group)
    text = "on: the EAGLE-3 drafter of --draft-model learns from the outputs in idle time (extra "
    text += "train); or a folder that keeps what it learned"
    _add_engine_option(group, "learn_drafts", "FOLDER", str, text)
    text = "bytes of the latest outputs to learn from, with their rows"
    _add_engine_option(group, "learn_drafts_bytes", "N", int, text)
    group.add_argument(
        "--learn-salted",
        action="store_true",
        help="learning from requests with a cache salt too; tenants may notice it in the speed",
    )


def _add_engine_option(group: Arguments, name: str, metavar: str, kind: type, text: str) -> None:
    group.add_argument(
        f"--{name.replace('_', '-')}",
        type=kind,
        metavar=metavar,
        default=_DEFAULTS[name],
        help=text,
    )


def _add_replicas(group: Arguments) -> None:
    group.add_argument(
        "--replicas",
        type=whole_number(0, MAX_COUNT),
        default=0,
        metavar="N",
        help="number of engines, each in a process; 0: one engine without Ray",
    )
    group.add_argument(
        "--max-replicas",
        type=whole_number(0, MAX_COUNT),
        default=0,
        metavar="N",
        help="maximum engines under load; 0: the same as --replicas",
    )
    group.add_argument(
        "--scale-up-seconds",
        type=number(0, MAX_SECONDS),
        default=10.0,
        metavar="S",
        help="seconds of sustained overload before a replica is added",
    )
    group.add_argument(
        "--scale-down-seconds",
        type=number(0, MAX_SECONDS),
        default=120.0,
        metavar="S",
        help="seconds of sustained spare capacity before a replica is removed",
    )


def run(args: argparse.Namespace) -> int:
    check_installed()
    if args.replicas or args.max_replicas:
        return _serve_replicas(args)
    follow_if_not_first(args)
    from headrace.remote.start import starting_engine

    # The engine process starts before the imports of this one, so that both import at once.
    with starting_engine() as started:
        return _serve(args, started)


def _serve(args: argparse.Namespace, started: "StartedEngine") -> int:
    from headrace.remote.client import EngineClient
    from headrace.server.serving import serve

    config, settings, adapters = _engine_config(args), _settings(args), _adapters(args.lora)
    return serve(
        args.model,
        config,
        settings,
        lambda: EngineClient(args.model, config, adapters, settings.stall_seconds, started),
        announce,
    )


def _serve_replicas(args: argparse.Namespace) -> int:
    min_replicas = max(1, args.replicas)
    max_replicas = max(min_replicas, args.max_replicas)
    if 0 < args.max_replicas < min_replicas:
        raise RequestError(
            f"--max-replicas {args.max_replicas} is below --replicas {args.replicas}; use a larger "
            "number, or 0"
        )
    if args.worker:
        raise RequestError(
            "--worker is for one engine behind `headrace route`; leave out --worker or --replicas"
        )
    check_installed("several replicas", "ray", "ray")
    from headrace.scaleout.ray_cluster import Scale
    from headrace.scaleout.ray_serve import serve_replicas

    scale = Scale(
        replicas=min_replicas,
        max_replicas=max_replicas,
        up_seconds=args.scale_up_seconds,
        down_seconds=args.scale_down_seconds,
    )
    numbers = f"{min_replicas}"
    if max_replicas > min_replicas:
        numbers += f" to {max_replicas}"
    cluster = os.environ.get("RAY_ADDRESS") or "Ray on this machine"
    return serve_replicas(
        args.model,
        _engine_config(args),
        _settings(args),
        _adapters(args.lora),
        scale,
        lambda state, port: announce(state, port, f"replicas  {numbers}, on {cluster}"),
    )


def follow_if_not_first(args: argparse.Namespace) -> None:
    parallel = {name: getattr(args, name) for name in PARALLEL}
    if parallel != {name: _DEFAULTS[name] for name in PARALLEL}:
        from headrace.loader import options, ranks

        ranks.follow_if_not_rank_0(options.engine_config(parallel))


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    from headrace.loader.options import engine_config

    return engine_config({name: getattr(args, name) for name in _ENGINE_OPTIONS})


def _settings(args: argparse.Namespace) -> "Settings":
    return settings_of(args, stall_seconds=args.stall_seconds, worker=args.worker)


def _adapters(values: list[str]) -> dict[str, str]:
    adapters: dict[str, str] = {}
    for value in values:
        name, _, path = value.partition("=")
        if not name or not path:
            raise RequestError(f"--lora {value!r} lacks a name or a path; write NAME=PATH")
        if name in adapters:
            raise RequestError(f"--lora {value!r} repeats a name; give each adapter its own name")
        adapters[name] = path
    return adapters
