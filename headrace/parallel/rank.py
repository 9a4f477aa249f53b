from collections import deque
from collections.abc import Mapping
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from headrace.backend.cpu.executable import CpuExecutable, instructions
from headrace.backend.variants import GatheredRows
from headrace.batch import RaggedBatch
from headrace.config import Activations, KvConfig
from headrace.parallel.collectives import Collectives
from headrace.parallel.mesh import Mesh, adapter_share, weights_of
from headrace.program.adapter import (
    Adapter,
    low_rank_part,
    own_name,
    own_weights,
    with_own_weights,
)
from headrace.program.trace import Program
from headrace.quant.digest import tensors_digest
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

_HASHED_BYTES = 1 << 18
"""Bytes of each tensor: a host reads the whole of its own share alone."""
_MAX_STAGE_STEPS = 4096


@frozen
class RankConfig:
    mesh: Mesh
    rank: int
    kv: KvConfig
    threads: int
    activations: Activations


def identity(tensors: Mapping[str, StoredTensor]) -> str:
    """Return a text of instruction set and model, equal for ranks with equal results."""
    return f"instructions {instructions()}, tensors {tensors_digest(tensors, _HASHED_BYTES)}"


class Rank:
    """Executables by number: the model, then attached programs."""

    def __init__(
        self,
        config: RankConfig,
        program: Program,
        tensors: Mapping[str, StoredTensor],
        collectives: Collectives,
    ) -> None:
        self.config = config
        self._collectives = collectives
        self._stage_steps: deque[tuple[float, float]] = deque(maxlen=_MAX_STAGE_STEPS)
        self._program, self._tensors = program, dict(tensors)
        self._layer_stages = config.mesh.layer_stages(program) if config.mesh.pipeline > 1 else None
        self.identity = identity(tensors)
        share = config.mesh.program(program, config.rank)
        executable = CpuExecutable(
            share,
            weights_of(share, tensors),
            config.kv,
            config.threads,
            instructions(),
            activations=config.activations,
            process_group=collectives,
        )
        self.executables = [executable]

    def run(self, number: int, batch: RaggedBatch) -> GatheredRows:
        """Run a program; its rows are valid until the next run."""
        start, wait_before = monotonic(), self._collectives.wait_seconds
        rows = self.executables[number].run_variants(batch)
        wait_seconds = self._collectives.wait_seconds - wait_before
        self._stage_steps.append((start + wait_seconds, monotonic()))
        return rows

    def stage_steps(self) -> NDArray[np.float64]:  # [steps, (begin, end)]
        """Return and forget the last step times, at most 4,096."""
        stage_steps = np.array(self._stage_steps, np.float64).reshape(-1, 2)
        self._stage_steps.clear()
        return stage_steps

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> CpuExecutable:
        """Attach a program to the model's KV. A program with its own `kv` has no number."""
        if kv is not None:
            return self.executables[0].attach(program, weights, kv)
        self._tensors |= weights
        share = self.config.mesh.program(program, self.config.rank, self._layer_stages)
        attached = self.executables[0].attach(share, weights_of(share, self._tensors))
        self.executables.append(attached)
        return attached

    def add_adapter(self, adapter: Adapter) -> int:
        """Return a number that is equal on all ranks.

        Raises UnsupportedModelError for a weight that the model does not use.
        """
        executable, low_rank = self.executables[0], low_rank_part(adapter)
        if len(low_rank) == len(adapter):
            return executable.add_adapter(adapter_share(executable.program, low_rank))

        own = own_weights(self._program, self._used(adapter), self._tensors)
        tensors = {own_name(name): tensor for name, tensor in own.items()}
        share = self.config.mesh.program(
            with_own_weights(self._program, own), self.config.rank, self._layer_stages
        )
        weights = weights_of(share, {**self._tensors, **tensors})
        return executable.add_variant(share, weights, adapter_share(share, low_rank))

    def _used(self, adapter: Adapter) -> Adapter:
        """The changes of weights that this stage has; changes of no stage's weights stay, too."""
        mesh, program = self.config.mesh, self._program
        stage = mesh.stage_program(program, self.config.rank, self._layer_stages)
        others = program.weights.keys() - stage.weights.keys()
        return {
            name: change
            for name, change in adapter.items()
            if name not in others and name.removesuffix("_bias") not in others
        }

    def remove_adapter(self, number: int) -> None:
        self.executables[0].remove_adapter(number)

    def close(self) -> None:
        for executable in reversed(self.executables):
            executable.close()
