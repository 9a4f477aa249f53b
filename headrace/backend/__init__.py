"""Backends by name (`headrace/backend_traits.py`), and the protocol of their executables.

A backend is a module with `lower(program, weights)`, `compile(program, weights, kv, threads,
activations)` and `instructions()`.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

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
    """Copies of KV blocks in the host's memory, in order with launches."""

    num_blocks: tuple[int, ...]
    """Number of blocks of each KV group; a block takes memory at its first use."""
    block_bytes: tuple[int, ...]
    block_seconds: float
    """Seconds to load one block of every group."""

    def save(self, group: int, block: int, host_block: int) -> None:
        """Copy a block to the host. Raises MemoryError if the host is full."""

    def load(self, group: int, host_block: int, block: int) -> None:
        """Copy a block back, into any block of its group."""


class KvBlocks(Protocol):
    """The stored bytes of KV blocks, which another executable of the same program can take."""

    block_bytes: tuple[int, ...]
    """Bytes of a block of each KV group."""

    def read(self, group: int, block: int, to: NDArray[np.uint8]) -> None:
        """Copy a block out. Another thread may do so during a step that leaves the block alone."""

    def write(self, group: int, block: int, source: NDArray[np.uint8]) -> None:
        """Fill a block between two steps."""


class Executable(Protocol):
    """A compiled program with its weights and KV. Calls take effect in order."""

    program: Program
    max_in_flight: int
    """Max launches before the first result is waited for; 1 if a launch runs at once."""
    kv_groups: tuple[KvGroup, ...]
    """Attached programs over the same KV use the same groups."""

    def prepare(self, max_rows: int, max_logit_rows: int) -> None:
        """Prepare for steps of up to these sizes. It may take a while."""

    def launch(
        self,
        batch: RaggedBatch,
        ops: Sequence[LogitOp] = (),
        *,
        logits: bool = False,
        hidden: bool = False,
    ) -> Ticket:
        """Run one forward over the batch, then the ops on its logits.

        `logits` and `hidden` request these rows; taps come with the hidden rows. A row may take
        its token from the previous launch.
        """

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> "Executable":
        """Compile another program on the same threads, over the same KV or its own `kv`.

        Over the same KV, both share weights of the same name. With its own KV, a backend that
        `shares_tensors` shares those whose stored tensor is the same object. It is closed
        separately.
        """

    def profile(self, batch: RaggedBatch) -> StepTimes:
        """Run one forward, and measure the time of each op."""

    def expert_loads(self) -> NDArray[np.int64]:
        """Rows of each expert since compilation, [ops over experts, experts], padded with zeros."""

    def add_adapter(self, adapter: Adapter) -> int:
        """Store an adapter, and return its number for batches."""

    def remove_adapter(self, number: int) -> None:
        """Free an adapter. A later adapter may get its number."""

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        """Copy KV from slots `source[i]` to `target[i]`, in order, in all layers of a group."""

    def host_blocks(self, num_bytes: int) -> HostBlocks | None:
        """Host blocks within this memory; None without room, or if all KV is on the host."""

    def close(self) -> None:
        """Free the memory. The executable must not be used afterwards."""


@runtime_checkable
class KvBlockHost(Protocol):
    """An executable that gives out its KV blocks as bytes."""

    def kv_blocks(self) -> KvBlocks:
        """Its blocks, until it is closed."""


class DeviceDrafter(Protocol):
    """The programs of a drafter on a device that keeps their rows.

    Each call is one forward with the ops on its logits. A call takes effect after the last one,
    whose result need not be read: a row may take its token from it (`RaggedBatch.token_source`).
    """

    def start(self, batch: RaggedBatch, ops: Sequence[LogitOp], rows: Sequence[object]) -> Ticket:
        """Run the program over rows of the target: `rows` has kept taps for the batch's rows."""

    def follow(
        self, batch: RaggedBatch, ops: Sequence[LogitOp], last_rows: Sequence[int]
    ) -> Ticket:
        """Run the program over its own rows: those of the logit rows `last_rows` of the last
        call.
        """


@runtime_checkable
class DrafterHost(Protocol):
    """An executable whose device keeps rows for a drafter."""

    def attach_drafter(
        self,
        from_target: Any,
        from_itself: Any,
        tokens: NDArray[np.int32] | None,
        vocab_size: int,
    ) -> DeviceDrafter:
        """Keep the taps of this executable for a drafter of two attached executables.

        Logit i of the drafter belongs to token `tokens[i]` of `vocab_size` tokens; None: to token
        i. Taps no longer come to the host.
        """


def lower_program(backend: str, program: Program, weights: Mapping[str, StoredTensor]) -> Program:
    """The program in the backend's ops, with the bytes of its weights. Reads no weight.

    Raises RequestError for an unknown backend, UnsupportedModelError for a format without a
    kernel.
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
    """Compile a program. Raises RequestError for an unknown backend or an unsupported KV format."""
    check_kv_dtype(backend, kv.dtype)
    executable: Executable = _module(backend).compile(program, weights, kv, threads, activations)
    return executable


def instructions(backend: str) -> str:
    """The instruction set or GPU of a backend here: others may give other bits."""
    text: str = _module(backend).instructions()
    return text


def host_block_counts(num_bytes: int, groups: Sequence[tuple[int, int]]) -> list[int]:
    """Host blocks by KV group, in proportion to `groups`: (number of blocks, bytes of a block)."""
    total_bytes = sum(num_blocks * block_bytes for num_blocks, block_bytes in groups)
    return [num_bytes * num_blocks // total_bytes for num_blocks, _ in groups]


def forward(executable: Executable, batch: RaggedBatch) -> StepResult:
    """Run one forward; its logits and hidden rows are valid until the next launch."""
    return executable.launch(batch, logits=True, hidden=True).wait()


def expert_table(
    expert_rows: Sequence[Sequence[int]],
) -> NDArray[np.int64]:  # [ops over experts, experts]
    """The result of `Executable.expert_loads`, from the rows of each expert of each op."""
    table = np.zeros((len(expert_rows), max(map(len, expert_rows), default=0)), np.int64)
    for row, counts in zip(table, expert_rows, strict=True):
        row[: len(counts)] = counts
    return table


def _module(backend: str) -> ModuleType:
    traits_of(backend)  # raises RequestError for an unknown name
    return import_module(f"headrace.backend.{backend}")
