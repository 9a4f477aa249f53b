"""Ranks of the GPU backend as threads of this process, in Triton's interpreter, which runs one at a
time.
"""

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier, Lock
from typing import Any, TypeVar

import torch

from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.stream import HostStream, Stream
from headrace.batch import RaggedBatch
from headrace.config import KvConfig
from headrace.logit_ops import LogitOp, StepResult
from headrace.parallel.mesh import Mesh, weights_of
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor

SECONDS = 150
_T = TypeVar("_T")


class _Stage:
    def __init__(self, ranks: int) -> None:
        self.tensors: list[Any] = [None] * ranks
        self.barrier = Barrier(ranks)


class ThreadTransport:
    def __init__(
        self,
        stages: list[_Stage],
        queues: dict[tuple[int, int], "queue.Queue[torch.Tensor]"],
        stage: int,
        share: int,
        turn: Lock,
    ) -> None:
        self._stages, self._queues, self._turn = stages, queues, turn
        self._stage, self.share = stage, share
        self.received_numbers = 0

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        assert out.is_contiguous() and x.is_contiguous()
        stage = self._stages[self._stage]
        received = self._exchange([x.reshape(-1)] * len(stage.tensors))
        out.reshape(-1).copy_(torch.cat(received))

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
    ) -> None:
        pieces = self._exchange(list(x.split(list(sent))))
        assert [len(piece) for piece in pieces] == list(received)
        out.copy_(torch.cat(pieces))

    def broadcast(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        x.copy_(self._exchange([x] * len(self._stages[self._stage].tensors))[0])

    def send(self, x: torch.Tensor, stage: int) -> None:
        self._queues[stage, self.share].put(x.clone())

    def receive(self, out: torch.Tensor, stage: int) -> None:
        inbox = self._queues[self._stage, self.share]
        out.copy_(self._without_turn(lambda: inbox.get(timeout=SECONDS)))
        self.received_numbers += out.numel()

    def _exchange(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        """Give each rank its piece; return the pieces for this rank."""
        stage = self._stages[self._stage]
        stage.tensors[self.share] = [piece.clone() for piece in pieces]
        self._without_turn(lambda: stage.barrier.wait(SECONDS))
        received = [sent[self.share] for sent in stage.tensors]
        self._without_turn(lambda: stage.barrier.wait(SECONDS))
        for share, piece in enumerate(received):
            self.received_numbers += 0 if share == self.share else piece.numel()
        return received

    def _without_turn(self, work: Callable[[], _T]) -> _T:
        self._turn.release()
        try:
            return work()
        finally:
            self._turn.acquire()


class RankThreads:
    def __init__(
        self,
        mesh: Mesh,
        program: Program,
        tensors: Mapping[str, StoredTensor],
        kv: KvConfig,
        activations: torch.dtype = torch.bfloat16,
        make_stream: Callable[[], Stream] = HostStream,
    ) -> None:
        stages = [_Stage(mesh.tensor) for _ in range(mesh.pipeline)]
        places = [(mesh.stage(rank), mesh.share(rank)) for rank in range(mesh.ranks)]
        queues = {place: queue.Queue[torch.Tensor]() for place in places}
        self._turn, self._pool = Lock(), ThreadPoolExecutor(mesh.ranks)
        self.transports = [
            ThreadTransport(stages, queues, stage, share, self._turn) for stage, share in places
        ]
        self.streams = [make_stream() for _ in places]
        self.ranks = []
        for rank, transport in enumerate(self.transports):
            share = mesh.program(program, rank)
            self.ranks.append(
                CudaExecutable(
                    share,
                    weights_of(share, tensors),
                    kv,
                    activations,
                    self.streams[rank],
                    transport=transport,
                )
            )

    def run(self, batch: RaggedBatch, ops: Sequence[LogitOp] = ()) -> StepResult:
        """Run a batch on all ranks; return the results of rank 0, with its logits."""

        def run(number: int) -> StepResult:
            with self._turn:
                rank = self.ranks[number]
                mine = ops if number == 0 else ()
                return rank.launch(batch, mine, logits=rank.program.logits is not None).wait()

        runs = [self._pool.submit(run, number) for number in range(len(self.ranks))]
        wait(runs)  # even if the first has failed
        results = [done.result() for done in runs]
        return results[0]

    def close(self) -> None:
        self._pool.shutdown()
