"""A model on several ranks: their processes are started beside this one, which is rank 0."""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.errors import RequestError
from headrace.parallel.mesh import Mesh
from headrace.planner.host import usable_cores
from headrace.program.trace import Program

if TYPE_CHECKING:
    from headrace.parallel.executable import ParallelExecutable

_PROCESS = (sys.executable, "-P", "-m", "headrace.assembly.rank_process")


def mesh_of(config: EngineConfig) -> Mesh:
    """The mesh that a configuration asks for. Raises RequestError for a backend, or an installation, that cannot have several ranks."""
    sizes = config.tensor_parallel_size, config.pipeline_parallel_size
    mesh = Mesh(*sizes, config.enable_expert_parallel, config.enable_sequence_parallel)
    if mesh.ranks > 1 and config.backend != "cpu":
        raise RequestError(f"the {config.backend} backend has one rank: choose backend 'cpu', or a parallel size of 1")
    if mesh.ranks > 1 and find_spec("torch") is None:
        raise RequestError("several ranks need the package torch: pip install 'headrace[distributed]'")
    return mesh


def threads_of(config: EngineConfig, mesh: Mesh) -> int:
    """Compute threads of each rank."""
    return config.threads or max(1, usable_cores() // mesh.ranks)


def compile_ranks(
    model: str, config: EngineConfig, mesh: Mesh, checkpoint: Checkpoint, program: Program, kv: KvConfig
) -> "ParallelExecutable":
    """Compile each rank's share, the first here and the others in processes that open the model by its name.

    They are waited for when the executable is connected.
    """
    from headrace.assembly.rank_process import setup_of  # which imports torch
    from headrace.parallel.carrier import GlooCarrier
    from headrace.parallel.exchange import Exchange
    from headrace.parallel.executable import ParallelExecutable
    from headrace.parallel.followers import Followers
    from headrace.parallel.rank import Rank, RankConfig

    own, *others = (RankConfig(mesh, rank, kv, threads_of(config, mesh), config.activations) for rank in range(mesh.ranks))
    carrier = GlooCarrier(mesh, 0)
    followers = Followers(_PROCESS, [setup_of(model, config, one) for one in others], carrier)
    try:
        rank = Rank(own, program, checkpoint.tensors, Exchange(carrier))
        return ParallelExecutable(rank, program, carrier, followers)
    except BaseException:
        followers.close()
        raise
