"""Backends by name. Each is a module with `compile(program, weights, kv, threads) -> Executable`."""

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from headrace._native import Pool
from headrace.batch import Ints, RaggedBatch, StepRows, StepTimes
from headrace.config import KvConfig
from headrace.errors import RequestError
from headrace.program.kv import KvGroup
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor

BACKENDS = ("cpu", "reference")


class Executable(Protocol):
    """A compiled program with its weights and KV storage."""

    program: Program
    """What runs, after fusing."""
    kv_groups: tuple[KvGroup, ...]
    """Of the KV that it stores; an attached program uses that of the program which it is attached to."""

    @property
    def pool(self) -> Pool:
        """The threads that it runs on, for other work between two runs; not to be kept."""

    def run(self, batch: RaggedBatch) -> StepRows:
        """One forward over all rows of the batch."""

    def attach(self, program: Program, weights: Mapping[str, StoredTensor]) -> "Executable":
        """Another program over the same KV and threads; a weight that both name is there once. Closed on its own."""

    def profile(self, batch: RaggedBatch) -> StepTimes:
        """The same forward, with a clock beside it."""

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        """Copy the KV of slots `source[i]` to `target[i]`, in order, all layers and heads of a group."""

    def close(self) -> None:
        """Give the memory back; the executable is not used afterwards."""


def compile_program(backend: str, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig, threads: int | Pool) -> Executable:
    """Compile for the named backend, with threads of its own or those of another executable.

    Raises RequestError for a name that is not in BACKENDS.
    """
    if backend not in BACKENDS:
        raise RequestError(f"unknown backend {backend!r}; there are: {', '.join(BACKENDS)}")
    executable: Executable = import_module(f"headrace.backend.{backend}").compile(program, weights, kv, threads)
    return executable
