"""Speed of this process's GPU: bytes and operations per second, and seconds per launch."""

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from headrace.backend.cuda.device import DEVICE, multiprocessors
from headrace.backend.cuda.kernels.speed import READ_BLOCK, multiply, multiply_add, read
from headrace.backend.cuda.launch import Launch
from headrace.backend.cuda.stream import Stream, make_stream

Kind = Literal["int8", "fp8", "bf16", "f32"]

_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
_MAX_BYTES = 1 << 30
_TILE = 128
# Bytes of a row multiplied at once. GPUs before Hopper hold them in registers.
_PART_BYTES, _OLDER_PART_BYTES = 256, 64
_SECONDS = 0.02  # Length of one measurement of arithmetic
_REPEATS = 5  # the fastest counts: a busy GPU looks too slow, never too fast
_LAUNCHES = 200


class LaunchSeconds(NamedTuple):
    """Seconds per launch, averaged over many."""

    eager: float
    graph: float  # As part of a graph


def read_bandwidth() -> float:
    """Bytes per second that kernels read."""
    x = _memory()
    launch = read(x, torch.zeros(x.numel() // READ_BLOCK, device=DEVICE))
    return float(x.nbytes) / _best(lambda: make_stream().times([launch])[0])


def copy_bandwidth() -> float:
    """Bytes per second of a copy on the device, reads plus writes."""
    x = _memory()
    half, stream = x.numel() // 2, make_stream()

    def seconds() -> float:
        started = time.perf_counter()
        stream.copy(x[:half], x[half:])
        stream.mark().synchronize()
        return time.perf_counter() - started

    return float(x.nbytes) / _best(seconds)


def rate(kind: Kind, tile: int = _TILE, part_bytes: int = 0, min_rounds: int = 1000) -> float:
    """Operations per second of products in a number format; 0 if the GPU does not support
    it.

    A multiply-add counts as two operations.
    """
    capability = torch.cuda.get_device_capability(DEVICE) if DEVICE.type == "cuda" else (9, 0)
    if kind == "fp8" and capability < (8, 9):
        return 0.0
    programs = 2 * multiprocessors()
    if kind == "f32":
        x = torch.full((4 * programs * tile * tile,), 0.5, device=DEVICE)
        return _rate(
            lambda rounds: multiply_add(x, rounds, tile * tile // 2), 2 * x.numel(), min_rounds
        )
    part = (part_bytes or (_PART_BYTES if capability >= (9, 0) else _OLDER_PART_BYTES)) // _TYPES[
        kind
    ].itemsize
    numbers = torch.rand(2, tile, part, device=DEVICE) - 0.5
    a, b = (255 * numbers if kind == "int8" else numbers).to(_TYPES[kind])
    out = torch.zeros(
        programs * tile, dtype=torch.int32 if kind == "int8" else torch.float32, device=DEVICE
    )
    return _rate(
        lambda rounds: multiply(a, b, out, rounds, programs),
        2 * programs * tile * tile * part,
        min_rounds,
    )


def launch_seconds(launches: int = _LAUNCHES) -> LaunchSeconds:
    x, stream = torch.zeros(4 * READ_BLOCK, device=DEVICE), make_stream()
    several = [read(x, x)] * launches
    stream.run(several)
    graph = stream.capture(several)
    eager = _best(lambda: _seconds_of(stream, lambda: stream.run(several)))
    return LaunchSeconds(eager / launches, _best(lambda: _seconds_of(stream, graph)) / launches)


def _memory() -> torch.Tensor:
    """Zeros, far larger than the caches."""
    max_bytes = _MAX_BYTES
    if DEVICE.type == "cuda":
        max_bytes = min(max_bytes, torch.cuda.mem_get_info(DEVICE)[0] // 2)
    unit = 16 * READ_BLOCK
    return torch.zeros(max(1, max_bytes // (4 * unit)) * unit, device=DEVICE)


def _rate(launch: Callable[[int], Launch], operations: int, rounds: int) -> float:
    stream = make_stream()
    stream.run([launch(rounds)])  # which compiles it
    seconds = stream.times([launch(rounds)])[0]
    rounds = max(rounds, int(rounds * _SECONDS / seconds))
    return operations * rounds / _best(lambda: stream.times([launch(rounds)])[0])


def _best(seconds: Callable[[], float]) -> float:
    return min(seconds() for _ in range(_REPEATS))


def _seconds_of(stream: Stream, run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    stream.mark().synchronize()
    return time.perf_counter() - started
