"""A model on several ranks: their processes are started beside this one, which is rank 0, or come
from other hosts.
"""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headrace.backend import lower_program
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.errors import RequestError
from headrace.parallel.mesh import Mesh, weights_of
from headrace.planner.host import usable_cores
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor

if TYPE_CHECKING:
    from headrace.parallel.executable import ParallelExecutable
    from headrace.parallel.launch import Launcher

PROCESS = (sys.executable, "-P", "-m", "headrace.loader.rank_process")


def mesh_of(config: EngineConfig) -> Mesh:
    """The mesh that a configuration asks for. Raises RequestError for a backend, or an
    installation, that cannot have several ranks.
    """
    sizes = config.tensor_parallel_size, config.pipeline_parallel_size
    mesh = Mesh(
        *sizes,
        config.enable_expert_parallel,
        config.enable_sequence_parallel,
        config.pipeline_layers,
    )
    if mesh.ranks > 1 and not config.traits.has_ranks:
        raise RequestError(
            f"the {config.backend} backend has one rank: choose backend 'cpu', or a "
            "parallel size of 1"
        )
    if mesh.ranks > 1 and find_spec("torch") is None:
        raise RequestError(
            "several ranks need the package torch: pip install 'headrace[distributed]'"
        )
    return mesh


def threads_of(config: EngineConfig, mesh: Mesh) -> int:
    """Compute threads of each rank."""
    return config.threads or max(1, usable_cores() // mesh.ranks)


def rank_programs(
    config: EngineConfig, program: Program, tensors: Mapping[str, StoredTensor]
) -> list[Program]:
    """What each rank of a model runs, as the backend holds it. Raises UnsupportedModelError for
    ranks that cannot share it.
    """
    mesh = mesh_of(config)
    own = [mesh.program(program, rank) for rank in range(mesh.ranks)]
    return [lower_program(config.backend, one, weights_of(one, tensors)) for one in own]


def is_spread(mesh: Mesh) -> bool:
    """Whether the environment has a process for each rank, on whichever host. Raises RequestError
    where they are not as many.
    """
    if mesh.ranks == 1:
        return False
    from headrace.parallel.hosts import placement

    place = placement()
    if place and place.size not in (1, mesh.ranks):
        sizes = f"tensor_parallel_size {mesh.tensor} x pipeline_parallel_size {mesh.pipeline}"
        raise RequestError(
            f"the environment has {place.size} ranks, and {sizes} makes {mesh.ranks}"
        )
    return bool(place and place.size > 1)


def follow_where_not_first(config: EngineConfig) -> None:
    """In a process that the environment makes another rank than the first: follow that one to its
    end, and end this process with it.
    """
    mesh = mesh_of(config)
    if is_spread(mesh):
        from headrace.parallel.hosts import follow_rank_0, placement

        place = placement()
        if place and place.rank:
            sys.exit(follow_rank_0(place, PROCESS))


def compile_ranks(
    model: str,
    config: EngineConfig,
    mesh: Mesh,
    checkpoint: Checkpoint,
    program: Program,
    kv: KvConfig,
    launcher: "Launcher | None" = None,
) -> "ParallelExecutable":
    """Compile each rank's share, the first here and the others in processes that open the model by
    its name.

    A `launcher` gives these processes; None: this machine, or the hosts that the environment names.
    They are waited for when the executable is connected.
    """
    from headrace.loader.rank_process import setup_of  # which imports torch
    from headrace.parallel.collectives import Exchange
    from headrace.parallel.executable import ParallelExecutable
    from headrace.parallel.hosts import HostLauncher, placement
    from headrace.parallel.launch import LocalLauncher
    from headrace.parallel.rank import Rank, RankConfig, identity
    from headrace.parallel.transport import GlooCarrier
    from headrace.parallel.workers import Followers

    own, *others = (
        RankConfig(mesh, rank, kv, threads_of(config, mesh), config.activations)
        for rank in range(mesh.ranks)
    )
    carrier = GlooCarrier(mesh, 0)
    if launcher is None:
        place = placement() if is_spread(mesh) else None
        launcher = HostLauncher(place) if place else LocalLauncher(PROCESS)
    followers = Followers(
        launcher,
        [setup_of(model, config, one) for one in others],
        carrier,
        identity(checkpoint.tensors),
    )
    try:
        rank = Rank(own, program, checkpoint.tensors, Exchange(carrier))
        return ParallelExecutable(rank, program, carrier, followers)
    except BaseException:
        followers.close()
        raise
