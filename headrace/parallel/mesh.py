"""The mesh of ranks: stages of a pipeline, and shares of a stage's matrices."""

from collections.abc import Mapping
from dataclasses import replace

from headrace.config import KvConfig
from headrace.errors import UnsupportedModelError
from headrace.parallel.partition import kv_head_parts
from headrace.parallel.pipeline import cut
from headrace.parallel.tensor import TensorParallel, slice_tensor
from headrace.program.adapter import LowRank
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.record import frozen


@frozen
class Mesh:
    """Ranks by stage, then by share. Rank 0 is in the last stage, where tokens are sampled."""

    tensor: int = 1
    pipeline: int = 1
    shares_experts: bool = True
    """Whether the ranks of a stage divide its experts."""
    sequence: bool = False
    """Whether the residual stream is split by columns and norms by rows."""
    layers: tuple[int, ...] = ()
    """Layers of each stage; empty: `pipeline.cut` decides."""

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    def stage(self, rank: int) -> int:
        return self.pipeline - 1 - rank // self.tensor

    def share(self, rank: int) -> int:
        """Return the number of a rank in its stage."""
        return rank % self.tensor

    def rank(self, stage: int, share: int) -> int:
        return (self.pipeline - 1 - stage) * self.tensor + share

    def group(self, stage: int) -> list[int]:
        return [self.rank(stage, share) for share in range(self.tensor)]

    def program(
        self, program: Program, rank: int, layer_stages: Mapping[int, int] | None = None
    ) -> Program:
        """Return a rank's part of a program.

        Raises UnsupportedModelError if the mesh cannot split the program.
        """
        program = self.stage_program(program, rank, layer_stages)
        if self.tensor == 1:
            return program
        return TensorParallel(
            program, self.share(rank), self.tensor, self.shares_experts, self.sequence
        ).rewritten()

    def kv(self, kv: KvConfig, rank: int) -> KvConfig:
        """Return the KV of a rank, which has some of the KV heads."""
        own = []
        for rounding in kv.key_rounding:
            parts = kv_head_parts(len(rounding.centre), self.tensor)
            own.append(rounding.heads(*parts[self.share(rank)]))
        return replace(kv, key_rounding=tuple(own))

    def stage_program(
        self, program: Program, rank: int, layer_stages: Mapping[int, int] | None = None
    ) -> Program:
        """Return the program of a rank's stage."""
        if self.pipeline == 1:
            return program
        return self._stages(program, layer_stages)[self.stage(rank)]

    def layer_stages(self, program: Program) -> dict[int, int]:
        return {
            layer: number
            for number, stage in enumerate(self._stages(program))
            for group in stage.kv_groups
            for layer in group.layers
        }

    def _stages(
        self, program: Program, layer_stages: Mapping[int, int] | None = None
    ) -> list[Program]:
        if self.layers and layer_stages is None:
            layers = sorted(layer for group in program.kv_groups for layer in group.layers)
            if (len(self.layers), sum(self.layers)) != (self.pipeline, len(layers)):
                raise UnsupportedModelError(
                    f"pipeline_layers {self.layers} do not give {len(layers)} layers in "
                    f"{self.pipeline} stages"
                )
            stage_of = (stage for stage, count in enumerate(self.layers) for _ in range(count))
            layer_stages = dict(zip(layers, stage_of, strict=True))
        return cut(program, self.pipeline, layer_stages)


def weights_of(program: Program, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a rank's program, as views."""
    return {name: slice_tensor(tensors, weight) for name, weight in program.weights.items()}


def adapter_share(program: Program, adapter: Mapping[str, LowRank]) -> dict[str, LowRank]:
    share = {}
    for name in program.weights:
        full_name, bracket, rows = name.partition("[")
        if full_name in adapter:
            low_rank = adapter[full_name]
            first, last = 0, len(low_rank.up)
            if bracket:
                first, last = map(int, rows.rstrip("]").split(":"))
            share[name] = low_rank._replace(up=low_rank.up[first:last])
    return share
