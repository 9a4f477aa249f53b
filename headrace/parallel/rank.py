"""A rank: its executables, on any backend."""

from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Generic, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from headrace.backend import Executable, HostBlocks, instructions
from headrace.backend_traits import BackendName
from headrace.batch import Ints, RaggedBatch
from headrace.config import Activations, KvConfig
from headrace.logit_ops import LogitOp, Ticket
from headrace.parallel.mesh import Mesh, adapter_share, weights_of
from headrace.program.adapter import (
    Adapter,
    LowRank,
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
    backend: BackendName
    mesh: Mesh
    rank: int
    kv: KvConfig
    threads: int
    activations: Activations


class RankExecutable(Executable, Protocol):
    """An executable that can run a share of a model."""

    def add_variant(
        self,
        program: Program,
        own: Mapping[str, StoredTensor],
        low_rank: Mapping[str, LowRank],
    ) -> int:
        """Add an adapter with weights of its `own`, which has this program."""


_E = TypeVar("_E", bound=RankExecutable)


def identity(backend: str, tensors: Mapping[str, StoredTensor]) -> str:
    """Return a text of the processor and the model, equal for ranks with equal results."""
    return f"instructions {instructions(backend)}, tensors {tensors_digest(tensors, _HASHED_BYTES)}"


class Rank(Generic[_E]):
    """Executables by number: the model, then attached programs.

    A subclass makes them, and says how rank 0 and the others run a step.
    """

    executables: list[_E]
    max_in_flight: int
    """Launches of rank 0 before the first result is waited for."""
    launches_ahead = False
    """Whether a launch returns before its exchanges have ended."""
    has_last_tokens = False
    """Whether a launch takes tokens that the last one draws (`RaggedBatch.token_source`)."""

    def __init__(
        self, config: RankConfig, program: Program, tensors: Mapping[str, StoredTensor]
    ) -> None:
        self.config = config
        self._stage_steps: deque[tuple[float, float]] = deque(maxlen=_MAX_STAGE_STEPS)
        self._program, self._tensors = program, dict(tensors)
        self._layer_stages = config.mesh.layer_stages(program) if config.mesh.pipeline > 1 else None
        self.identity = identity(config.backend, tensors)
        share = config.mesh.program(program, config.rank)
        self.executables = [self._compile(share, weights_of(share, tensors))]

    def _compile(self, share: Program, weights: Mapping[str, StoredTensor]) -> _E:
        raise NotImplementedError

    def launch(
        self,
        number: int,
        batch: RaggedBatch,
        ops: Sequence[LogitOp],
        *,
        logits: bool,
        hidden: bool,
    ) -> Ticket:
        """Launch this rank's part of a step on rank 0."""
        raise NotImplementedError

    def run(self, number: int, batch: RaggedBatch) -> None:
        """Run this rank's part of a step on another rank."""
        raise NotImplementedError

    def host_block_counts(self, num_bytes: int) -> list[int]:
        """Return the host blocks of each KV group that fit on every rank; none: KV is on the host.

        The ranks of a machine share `num_bytes`.
        """
        return []

    def make_host_blocks(self, counts: Sequence[int]) -> HostBlocks:
        """Make host blocks, as many of each KV group. Raises MemoryLimitError without memory."""
        raise NotImplementedError

    def forget_steps(self) -> None:
        """Forget the steps in flight: exchanges have ended with an error."""

    def stage_steps(self) -> NDArray[np.float64]:  # [steps, (begin, end)]
        """Return and forget the last step times, at most 4,096."""
        stage_steps = np.array(self._stage_steps, np.float64).reshape(-1, 2)
        self._stage_steps.clear()
        return stage_steps

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> Executable:
        """Attach a program to the model's KV. A program with its own `kv` has no number."""
        if kv is not None:
            return self.executables[0].attach(program, weights, kv)
        self._tensors |= weights
        share = self.config.mesh.program(program, self.config.rank, self._layer_stages)
        attached = cast(_E, self.executables[0].attach(share, weights_of(share, self._tensors)))
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

    def move_slots(self, group: int, source: Ints, target: Ints) -> None:
        self.executables[0].move_slots(group, source, target)

    def close(self) -> None:
        for executable in reversed(self.executables):
            executable.close()

    def _record_time(self, start: float) -> None:
        self._stage_steps.append((start, monotonic()))
