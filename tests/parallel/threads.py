"""Ranks as threads of this process: the same kernels and exchanges as in processes of their own,
with rows that are handed over.
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
from headrace.parallel.collectives import Exchange, Floats
from headrace.parallel.mesh import Mesh, weights_of
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor

SECONDS = 20


class _Stage:
    def __init__(self, ranks: int) -> None:
        self.rows: list[Any] = [None] * ranks
        self.barrier = Barrier(ranks)


class _Carrier:
    def __init__(
        self,
        stages: list[_Stage],
        queues: dict[tuple[int, int], queue.Queue[Floats]],
        stage: int,
        share: int,
    ) -> None:
        self.stage, self.stages, self.queues, self.share, self.received = (
            stage,
            stages,
            queues,
            share,
            0,
        )

    def all_gather(self, numbers: Floats, sizes: Sequence[int]) -> list[Floats]:
        found = [each[self.share] for each in self._all([numbers] * len(sizes))]
        assert [len(one) for one in found] == list(sizes)
        return found

    def all_to_all(self, pieces: Sequence[Floats], sizes: Sequence[int]) -> list[Floats]:
        found = [each[self.share] for each in self._all(pieces)]
        assert [len(one) for one in found] == list(sizes)
        return found

    def _all(self, pieces: Sequence[Floats]) -> list[list[Floats]]:
        """What each rank has for each."""
        stage = self.stages[self.stage]
        stage.rows[self.share] = pieces
        stage.barrier.wait(SECONDS)
        found = [[piece.copy() for piece in each] for each in stage.rows]
        stage.barrier.wait(SECONDS)
        self.received += sum(
            each[self.share].nbytes for share, each in enumerate(found) if share != self.share
        )
        return found

    def send(self, rows: Floats, stage: int) -> None:
        self.queues[stage, self.share].put(rows.copy())

    def receive(self, out: Floats, stage: int) -> None:
        out[:] = self.queues[self.stage, self.share].get(timeout=SECONDS)
        self.received += out.nbytes


class Threads:
    """A mesh of ranks of one thread each, on the cpu backend."""

    def __init__(
        self,
        mesh: Mesh,
        program: Program,
        tensors: Mapping[str, StoredTensor],
        kv: KvConfig,
        fused: bool = True,
        **others: Any,
    ) -> None:
        stages = [_Stage(mesh.tensor) for _ in range(mesh.pipeline)]
        queues = {
            (stage, share): queue.Queue[Floats]()
            for stage in range(mesh.pipeline)
            for share in range(mesh.tensor)
        }
        self.pool = ThreadPoolExecutor(mesh.ranks)
        self.carriers = [
            _Carrier(stages, queues, mesh.stage(rank), rank % mesh.tensor)
            for rank in range(mesh.ranks)
        ]
        self.ranks = []
        for rank, carrier in enumerate(self.carriers):
            own, how = mesh.program(program, rank), lower if fused else lower_unfused
            self.ranks.append(
                CpuExecutable(
                    own,
                    weights_of(own, tensors),
                    kv,
                    1,
                    "",
                    lower=how,
                    process_group=Exchange(carrier),
                    **others,
                )
            )

    def logits(self, batch: RaggedBatch) -> list[Floats]:
        """One forward; the logits on each rank of the last stage."""
        runs = [self.pool.submit(rank.run, batch, batch.tokens) for rank in self.ranks]
        wait(runs)  # also where the first has failed
        for run in runs:
            run.result()
        return [
            np.array(logits) for rank in self.ranks if (logits := rank.logits(batch)) is not None
        ]

    def close(self) -> None:
        self.pool.shutdown()
