"""Which rank of a mesh has what: stages of a pipeline, whose ranks share its matrices."""

from collections.abc import Mapping

from headrace.errors import UnsupportedModelError
from headrace.parallel.pipeline import cut
from headrace.parallel.tensor import TensorParallel, share_of
from headrace.program.adapter import Adapter, LowRank
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.record import frozen


@frozen
class Mesh:
    """Ranks by stage, and within a stage by their share of it: rank = stage * tensor + share."""

    tensor: int = 1
    """Ranks that share each matrix."""
    pipeline: int = 1
    """Stages."""
    shares_experts: bool = True
    """Whether the ranks of a stage have some of its experts each, or all of them."""
    sequence: bool = False
    """Whether they split what layers add up by columns, and norm some rows each."""
    layers: tuple[int, ...] = ()
    """Layers of each stage; none: as `pipeline.cut` finds best."""

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tensor * self.pipeline

    @property
    def first_of_last_stage(self) -> int:
        """The rank that sends rank 0 the results, where that has none of its own."""
        return (self.pipeline - 1) * self.tensor

    def stage(self, rank: int) -> int:
        """The stage of a rank."""
        return rank // self.tensor

    def group(self, stage: int) -> list[int]:
        """The ranks of a stage, in the order of their shares."""
        return list(range(stage * self.tensor, (stage + 1) * self.tensor))

    def program(
        self, program: Program, rank: int, layer_stages: Mapping[int, int] | None = None
    ) -> Program:
        """What a rank runs of a program, whose layers may be those of another, in these stages.

        Raises UnsupportedModelError where so many ranks cannot share it.
        """
        stage = (
            self._stages(program, layer_stages)[self.stage(rank)] if self.pipeline > 1 else program
        )
        if self.tensor == 1:
            return stage
        return TensorParallel(
            stage, rank % self.tensor, self.tensor, self.shares_experts, self.sequence
        ).rewritten()

    def layer_stages(self, program: Program) -> dict[int, int]:
        """The stage of each layer of a program."""
        stages = self._stages(program)
        return {
            layer: number
            for number, stage in enumerate(stages)
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
                    f"layers {self.layers} of stages are not {len(layers)} layers in "
                    f"{self.pipeline} stages"
                )
            stage_of = (stage for stage, count in enumerate(self.layers) for _ in range(count))
            layer_stages = dict(zip(layers, stage_of, strict=True))
        return cut(program, self.pipeline, layer_stages)


def weights_of(program: Program, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a rank's program, as views of those of the whole model: nothing else of these
    is read.
    """
    return {name: share_of(tensors, weight) for name, weight in program.weights.items()}


def adapter_of(program: Program, adapter: Adapter) -> dict[str, LowRank]:
    """What of an adapter goes with the weights of a rank's program."""
    own = {}
    for name in program.weights:
        whole, bracket, rows = name.partition("[")
        if whole in adapter:
            first, last = (
                map(int, rows.rstrip("]").split(":")) if bracket else (0, len(adapter[whole].up))
            )
            own[name] = adapter[whole]._replace(up=adapter[whole].up[first:last])
    return own
