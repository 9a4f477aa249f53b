"""Ranks as threads of this process: the kernels and collectives of real ranks, with rows passed in
memory.
"""

import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from typing import Any

import numpy as np

from headrace.backend.cpu.executable import CpuExecutable, lower, lower_unfused
from headrace.batch import RaggedBatch
from headrace.config import KvConfig
from headrace.parallel.collectives import Collectives, Floats
from headrace.parallel.mesh import Mesh, weights_of
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor

SECONDS = 150


class _Stage:
    def __init__(self, ranks: int) -> None:
        self.rows: list[Any] = [None] * ranks
        self.barrier = Barrier(ranks)


class ThreadTransport:
    def __init__(
        self,
        stages: list[_Stage],
        queues: dict[tuple[int, int], queue.Queue[Floats]],
        stage: int,
        share: int,
    ) -> None:
        self.stages, self.queues = stages, queues
        self.stage, self.share = stage, share
        self.received_bytes = 0

    def all_gather(self, numbers: Floats, sizes: Sequence[int]) -> list[Floats]:
        return self._receive([numbers] * len(sizes), sizes)

    def all_to_all(self, pieces: Sequence[Floats], sizes: Sequence[int]) -> list[Floats]:
        return self._receive(pieces, sizes)

    def _receive(self, pieces: Sequence[Floats], sizes: Sequence[int]) -> list[Floats]:
        """Give each rank its piece; return the pieces for this rank."""
        stage = self.stages[self.stage]
        stage.rows[self.share] = pieces
        stage.barrier.wait(SECONDS)
        received = [sent[self.share].copy() for sent in stage.rows]
        stage.barrier.wait(SECONDS)
        assert [len(piece) for piece in received] == list(sizes)
        self.received_bytes += sum(
            piece.nbytes for share, piece in enumerate(received) if share != self.share
        )
        return received

    def send(self, rows: Floats, stage: int) -> None:
        self.queues[stage, self.share].put(rows.copy())

    def receive(self, out: Floats, stage: int) -> None:
        out[:] = self.queues[self.stage, self.share].get(timeout=SECONDS)
        self.received_bytes += out.nbytes


def transports_of(mesh: Mesh) -> list[ThreadTransport]:
    """The transports of all ranks, which pass rows to each other."""
    stages = [_Stage(mesh.tensor) for _ in range(mesh.pipeline)]
    queues = {
        (stage, share): queue.Queue[Floats]()
        for stage in range(mesh.pipeline)
        for share in range(mesh.tensor)
    }
    return [
        ThreadTransport(stages, queues, mesh.stage(rank), mesh.share(rank))
        for rank in range(mesh.ranks)
    ]


class Threads:
    """A mesh of ranks of one thread each, on the cpu backend."""

    def __init__(
        self,
        mesh: Mesh,
        program: Program,
        tensors: Mapping[str, StoredTensor],
        kv: KvConfig,
        fused: bool = True,
        **options: Any,
    ) -> None:
        self.pool = ThreadPoolExecutor(mesh.ranks)
        self.transports = transports_of(mesh)
        self.ranks = []
        for rank, transport in enumerate(self.transports):
            share = mesh.program(program, rank)
            self.ranks.append(
                CpuExecutable(
                    share,
                    weights_of(share, tensors),
                    mesh.kv(kv, rank),
                    1,
                    "",
                    lower=lower if fused else lower_unfused,
                    process_group=Collectives(transport),
                    **options,
                )
            )

    def logits(self, batch: RaggedBatch) -> list[Floats]:
        """Run a batch; return the logits of each rank of the last stage."""
        runs = [self.pool.submit(rank.run, batch, batch.tokens) for rank in self.ranks]
        wait(runs)  # even if the first has failed
        for run in runs:
            run.result()
        return [
            np.array(logits) for rank in self.ranks if (logits := rank.logits(batch)) is not None
        ]

    def close(self) -> None:
        self.pool.shutdown()
