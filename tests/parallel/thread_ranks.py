"""Ranks of an engine as threads of this process: the commands, kernels and collectives of real
ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

from headrace.backend import Executable
from headrace.backend_traits import BackendName
from headrace.config import Activations, KvConfig
from headrace.parallel.commands import (
    HEADER,
    Array,
    Command,
    CommandKind,
    adapter_from_arrays,
    batch_from_arrays,
    decode,
    encode,
)
from headrace.parallel.cpu_rank import CpuRank
from headrace.parallel.executable import ParallelExecutable
from headrace.parallel.mesh import Mesh
from headrace.parallel.rank import Rank, RankConfig
from headrace.parallel.workers import Workers
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from tests.parallel.threads import transports_of


def compile_two_ranks(
    backend: BackendName,
    program: Program,
    tensors: Mapping[str, StoredTensor],
    kv: KvConfig,
    threads: int = 1,
    activations: Activations = "int8",
) -> Executable:
    """Compile a program for two ranks that share its matrices, as `compile_program` for one."""
    mesh = Mesh(2)
    ranks = [
        CpuRank(
            RankConfig(
                backend=backend,
                mesh=mesh,
                rank=rank,
                kv=kv,
                threads=threads,
                activations=activations,
            ),
            program,
            tensors,
            transport,
        )
        for rank, transport in enumerate(transports_of(mesh))
    ]
    return _RanksOfThreads(ranks[0], program, ranks[1:])


class _RanksOfThreads(ParallelExecutable):
    def __init__(self, first: Rank[Any], program: Program, others: Sequence[Rank[Any]]) -> None:
        super().__init__(first, program, cast(Workers, _Threads(others)))
        self._others = others

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> Executable:
        if kv is None:
            for rank in self._others:  # a rank's process attaches its programs itself
                rank.attach(program, weights)
        return super().attach(program, weights, kv)


class _Threads:
    """Stands in for `Workers`: each rank runs its commands in a thread."""

    generation = 0

    def __init__(self, ranks: Sequence[Rank[Any]]) -> None:
        self._ranks, self._pool = ranks, ThreadPoolExecutor(len(ranks))
        self._runs: list[Future[None]] = []

    @contextmanager
    def working(self, generation: int | None = None) -> Iterator[None]:
        yield
        for run in self._runs:
            run.result()
        self._runs = []

    def send(self, command: Command) -> None:
        data = encode(command)
        self._runs = [self._pool.submit(_run, rank, data) for rank in self._ranks]

    def add_adapter(self, number: int, arrays: Sequence[Array | None]) -> None:
        data = encode(Command(CommandKind.ADD_ADAPTER, number, arrays))
        for rank in self._ranks:
            assert rank.add_adapter(adapter_from_arrays(_decoded(data).arrays)) == number

    def remove_adapter(self, number: int) -> None:
        for rank in self._ranks:
            rank.remove_adapter(number)

    def close(self) -> None:
        self._pool.shutdown()


def _decoded(data: bytes) -> Command:
    return decode(data[: HEADER.size], data[HEADER.size :])


def _run(rank: Rank[Any], data: bytes) -> None:
    command = _decoded(data)
    if command.kind == CommandKind.RUN:
        rank.run(command.program, batch_from_arrays(command.arrays))
    elif command.kind == CommandKind.MOVE_SLOTS:
        source, target = command.arrays
        assert source is not None and target is not None
        rank.move_slots(command.program, source, target)
    else:
        assert command.kind == CommandKind.PREPARE
