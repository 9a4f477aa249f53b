"""A rank on the cuda backend: its launches follow each other in the stream of its GPU."""

from collections import deque
from collections.abc import Mapping, Sequence

from headrace.backend import HostBlocks, host_block_counts
from headrace.backend.cuda import compile_share
from headrace.backend.cuda.executable import CudaExecutable
from headrace.backend.cuda.ticket import CudaTicket
from headrace.batch import RaggedBatch
from headrace.logit_ops import LogitOp
from headrace.parallel.config import ranks_of_host
from headrace.parallel.device_transport import DeviceTransport
from headrace.parallel.rank import Rank, RankConfig
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor


class GpuRank(Rank[CudaExecutable]):
    """Exchanges are launches in the stream, so no host waits for another rank.

    Tokens are sampled on rank 0. The next launch shares them with its stage in the stream.
    """

    launches_ahead = True

    def __init__(
        self,
        config: RankConfig,
        program: Program,
        tensors: Mapping[str, StoredTensor],
        transport: DeviceTransport,
    ) -> None:
        self._transport = transport
        self._tickets: deque[CudaTicket] = deque()
        self.max_in_flight = max(CudaExecutable.max_in_flight, config.mesh.pipeline)
        self.has_last_tokens = config.mesh.pipeline == 1
        super().__init__(config, program, tensors)

    def _compile(self, share: Program, weights: Mapping[str, StoredTensor]) -> CudaExecutable:
        return compile_share(
            share, weights, self.config.kv, self.config.activations, self._transport
        )

    def launch(
        self,
        number: int,
        batch: RaggedBatch,
        ops: Sequence[LogitOp],
        *,
        logits: bool,
        hidden: bool,
    ) -> CudaTicket:
        return self.executables[number].launch(batch, ops, logits=logits, hidden=hidden)

    def run(self, number: int, batch: RaggedBatch) -> None:
        self._tickets.append(self.executables[number].launch(batch))
        while self._tickets and self._tickets[0].ready:
            self._tickets.popleft().wait()

    def host_block_counts(self, num_bytes: int) -> list[int]:
        config, own_bytes = self.config, num_bytes // ranks_of_host(self.config.mesh)
        counts: list[list[int]] = []
        for rank in range(config.mesh.ranks):
            share = config.mesh.program(self._program, rank, self._layer_stages)
            block_bytes = [
                group.block_bytes(config.kv.dtype, config.kv.block_size)
                for group in share.kv_groups
            ]
            if not all(block_bytes):
                return []  # a stage without layers of a group has nothing to copy
            groups = list(zip(config.kv.num_blocks, block_bytes, strict=True))
            counts.append(host_block_counts(own_bytes, groups))
        return list(map(min, zip(*counts, strict=True)))

    def make_host_blocks(self, counts: Sequence[int]) -> HostBlocks:
        return self.executables[0].make_host_blocks(counts)

    def forget_steps(self) -> None:
        self._tickets.clear()
        for executable in self.executables:
            executable.forget_launches()
