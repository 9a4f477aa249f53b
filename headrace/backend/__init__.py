"""Backends by name. Each is a module with `lower(program, weights)` and `compile(program, weights,
kv, threads)`.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.backend_traits import check_kv_dtype, traits_of
from headrace.batch import Ints, RaggedBatch, StepTimes
from headrace.config import Activations, KvConfig
from headrace.logit_ops import LogitOp, StepResult, Ticket
from headrace.program.adapter import Adapter
from headrace.program.kv import KvGroup
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor


class HostBlocks(Protocol):
    """Blocks in the host's memory for copies of those that an executable stores, made in order with
    its launches.
    """

    num_blocks: tuple[int, ...]
    """Most of each group. They take memory when they are first used, the lowest first."""
    block_bytes: tuple[int, ...]
    """Bytes of one of each group."""
    block_seconds: float
    """What it takes to copy a block of every group back."""

    def save(self, group: int, block: int, host_block: int) -> None:
        """Copy a block of a group to the host, all layers and heads. Raises MemoryError where there
        is no memory for it.
        """

    def load(self, group: int, host_block: int, block: int) -> None:
        """Copy a block of the host back, into any block of its group."""


class Executable(Protocol):
    """A compiled program with its weights and KV storage. Launches, draws, moves and what is done
    with adapters take effect in order.
    """

    program: Program
    """What runs: the program as `lower_program` gives it."""
    max_in_flight: int
    """Launches that may be outstanding before one is waited for: 1 where a launch runs at once."""
    kv_groups: tuple[KvGroup, ...]
    """The groups of the KV that it stores; a program that is attached over the same KV uses those
    of the program it is attached to.
    """

    def prepare(self, max_rows: int, max_logit_rows: int) -> None:
        """Do what steps of up to so many rows, and of these so many with logits, would else wait
        for. It may take a while.
        """

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> Ticket:
        """One forward over all rows of the batch, and these ops on its logits.

        `logits` and `hidden` ask for the rows themselves. A row of the batch may take its token
        from an op of the launch before.
        """

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> "Executable":
        """Another program on the same threads, over the same KV, or over KV of its own. It is
        closed on its own.

        Over the same KV a weight that both programs name is there once.
        """

    def profile(self, batch: RaggedBatch) -> StepTimes:
        """The same forward, with a clock beside it."""

    def expert_loads(self) -> NDArray[np.int64]:
        """Rows that have gone to each expert since it was compiled, [ops over experts, experts];
        [0, 0] where it has none.

        Where ops have different numbers of experts, the rows of the array end in zeros.
        """

    def add_adapter(self, adapter: Adapter) -> int:
        """Keep an adapter for the sequences of a batch that name its number, which it returns."""

    def remove_adapter(self, number: int) -> None:
        """Give the memory of an adapter back. Its number may come again."""

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        """Copy the KV of slots `source[i]` to `target[i]`, in order, all layers and heads of a
        group.
        """

    def host_blocks(self, num_bytes: int) -> HostBlocks | None:
        """Blocks in so many bytes of the host's memory; None where all KV is there, or the bytes
        are too few.
        """

    def close(self) -> None:
        """Give the memory back; the executable is not used afterwards."""


def lower_program(backend: str, program: Program, weights: Mapping[str, StoredTensor]) -> Program:
    """The program as the named backend runs it: in its ops, with the bytes that its weights take in
    its memory.

    Nothing of the weights is read. Raises RequestError for a name that is not in BACKENDS, and
    UnsupportedModelError for weights in a format that the backend has no kernel for.
    """
    lowered: Program = _module(backend).lower(program, weights)
    return lowered


def compile_program(
    backend: str,
    program: Program,
    weights: Mapping[str, StoredTensor],
    kv: KvConfig,
    threads: int,
    activations: Activations = "int8",
) -> Executable:
    """Compile for the named backend. Raises RequestError for a name that is not in BACKENDS, and
    for KV that it does not keep.
    """
    check_kv_dtype(backend, kv.dtype)
    executable: Executable = _module(backend).compile(program, weights, kv, threads, activations)
    return executable


def host_block_counts(num_bytes: int, groups: Sequence[tuple[int, int]]) -> list[int]:
    """How many blocks of each group so many bytes are for, in proportion to the blocks that there
    are, which have so many bytes each.
    """
    whole = sum(num_blocks * size for num_blocks, size in groups)
    return [num_bytes * num_blocks // whole for num_blocks, _ in groups]


def forward(executable: Executable, batch: RaggedBatch) -> StepResult:
    """One forward, waited for, with its logits and the hidden rows that the program keeps; valid
    until the next launch.
    """
    return executable.launch(batch, logits=True, hidden=True).wait()


def expert_table(
    loads: Sequence[Sequence[int]],
) -> NDArray[np.int64]:  # [ops over experts, experts]
    """What `Executable.expert_loads` returns, from the rows that went to each expert of each op."""
    table = np.zeros((len(loads), max(map(len, loads), default=0)), np.int64)
    for row, own in zip(table, loads, strict=True):
        row[: len(own)] = own
    return table


def _module(backend: str) -> ModuleType:
    traits_of(backend)  # raises RequestError for an unknown name
    return import_module(f"headrace.backend.{backend}")
