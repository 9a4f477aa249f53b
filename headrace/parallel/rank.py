"""What one rank runs: its share of a model, and of what is attached to it."""

from collections import deque
from collections.abc import Mapping
from hashlib import blake2b
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from headrace import _native
from headrace.backend.cpu.executable import CpuExecutable
from headrace.batch import RaggedBatch
from headrace.config import Activations, KvConfig
from headrace.parallel.collectives import Exchange
from headrace.parallel.mesh import Mesh, adapter_of, weights_of
from headrace.program.adapter import Adapter
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.record import frozen

_HASHED = 256
"""Bytes."""
_MOST_STEPS = 4096


@frozen
class RankConfig:
    """How a rank is compiled, beside its program."""

    mesh: Mesh
    rank: int
    kv: KvConfig
    """Blocks of each group of the whole model; a rank keeps its own heads and layers in them."""
    threads: int
    activations: Activations


def identity(tensors: Mapping[str, StoredTensor]) -> str:
    """What ranks have in common that give the same numbers: the instructions that they compute
    with, and what they know of the model.

    That is a hash of the names, shapes and formats of all tensors, and of the first bytes of each.
    """
    hashed = blake2b(digest_size=8)
    for name, tensor in sorted(tensors.items()):
        hashed.update(f"{name} {tensor.shape} {tensor.format.name}\n".encode())
        for part in tensor.parts.values():
            hashed.update(part[:1].tobytes()[:_HASHED])
    return f"instructions {_native.isa()}, tensors {hashed.hexdigest()}"


class Rank:
    """The executables of a rank by number: that of the model, then those that are attached to it,
    in the order in which they came.
    """

    def __init__(
        self,
        config: RankConfig,
        program: Program,
        tensors: Mapping[str, StoredTensor],
        exchange: Exchange,
    ) -> None:
        self.config = config
        self._exchange = exchange
        self._stage_steps: deque[tuple[float, float]] = deque(maxlen=_MOST_STEPS)
        self._tensors = dict(tensors)
        self._layer_stages = config.mesh.layer_stages(program) if config.mesh.pipeline > 1 else None
        self.identity = identity(tensors)
        own = config.mesh.program(program, config.rank)
        compiled = CpuExecutable(
            own,
            weights_of(own, tensors),
            config.kv,
            config.threads,
            "",
            activations=config.activations,
            process_group=exchange,
        )
        self.executables = [compiled]

    def run(self, number: int, batch: RaggedBatch) -> CpuExecutable:
        """Run a batch, whose tokens are known, through the executable of this number; returns
        that.
        """
        executable, begun, waited = self.executables[number], monotonic(), self._exchange.waited
        executable.run(batch, batch.tokens)
        self._stage_steps.append((begun + self._exchange.waited - waited, monotonic()))
        return executable

    def stage_steps(self) -> NDArray[np.float64]:  # [steps, (begin, end)]
        """When the last steps ran here, up to 4,096 since this was asked before."""
        stage_steps = np.array(self._stage_steps, np.float64).reshape(-1, 2)
        self._stage_steps.clear()
        return stage_steps

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> CpuExecutable:
        """Compile another program, over the same KV, with layers in the stages of those of the
        model; or one that runs here alone, over KV of its own, and has no number.
        """
        if kv is not None:
            return self.executables[0].attach(program, weights, kv)
        self._tensors |= weights
        own = self.config.mesh.program(program, self.config.rank, self._layer_stages)
        self.executables.append(self.executables[0].attach(own, weights_of(own, self._tensors)))
        return self.executables[-1]

    def add_adapter(self, adapter: Adapter) -> int:
        """Keep what of an adapter goes with the weights that are here; returns its number, which
        all ranks give it.
        """
        return self.executables[0].add_adapter(adapter_of(self.executables[0].program, adapter))

    def remove_adapter(self, number: int) -> None:
        """Give the memory of an adapter back."""
        self.executables[0].remove_adapter(number)

    def close(self) -> None:
        """Give the memory back."""
        for executable in reversed(self.executables):
            executable.close()
