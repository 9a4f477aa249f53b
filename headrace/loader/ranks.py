"""Loads a model on several ranks. The modules of `parallel/` that need torch are imported late."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.parallel.config import is_multi_host, mesh_of, threads_per_rank
from headrace.parallel.mesh import Mesh
from headrace.program.trace import Program

if TYPE_CHECKING:
    from headrace.parallel.executable import ParallelExecutable
    from headrace.parallel.launch import Launcher

RANK_COMMAND = (sys.executable, "-P", "-m", "headrace.loader.rank_process")
"""Command line of the process of a rank other than 0."""


def follow_if_not_rank_0(config: EngineConfig) -> None:
    """Run as a worker if the environment gives this process a rank other than 0.

    A worker follows rank 0 to its end. The call then exits this process. For rank 0,
    and for a process without a launcher such as torchrun, it returns at once.
    """
    if is_multi_host(mesh_of(config)):
        from headrace.parallel.hosts import placement, run_worker

        place = placement()
        if place and place.rank:
            sys.exit(run_worker(place, RANK_COMMAND))


def compile_ranks(
    model: str,
    config: EngineConfig,
    mesh: Mesh,
    checkpoint: Checkpoint,
    program: Program,
    kv: KvConfig,
    launcher: "Launcher | None" = None,
    taps: Sequence[int] = (),
) -> "ParallelExecutable":
    """Compile rank 0 in this process, and start a process for each other rank.

    `taps` are the layers before which `program` takes rows for a drafter.

    Each process opens the model by its name. `ParallelExecutable.connect` waits for all
    of them. Without a `launcher` the processes run on this machine, or on the hosts of
    the environment. Raises UnsupportedModelError if the mesh cannot split the program.
    """
    from headrace.parallel.executable import ParallelExecutable
    from headrace.parallel.hosts import HostLauncher, placement
    from headrace.parallel.launch import LocalLauncher
    from headrace.parallel.make_rank import make_rank, make_transport
    from headrace.parallel.rank import RankConfig, identity
    from headrace.parallel.setup import setup_of
    from headrace.parallel.workers import Workers

    mesh.program(program, 0)  # a mesh that cannot split the program starts no process
    threads = threads_per_rank(config, mesh)
    first, *others = (
        RankConfig(
            backend=config.backend,
            mesh=mesh,
            rank=rank,
            kv=kv,
            threads=threads,
            activations=config.activations,
        )
        for rank in range(mesh.ranks)
    )
    transport = make_transport(first)
    if launcher is None:
        place = placement() if is_multi_host(mesh) else None
        launcher = HostLauncher(place) if place else LocalLauncher(RANK_COMMAND)
    setups = [setup_of(model, config, other, taps) for other in others]
    workers = Workers(launcher, setups, transport, identity(config.backend, checkpoint.tensors))
    try:
        rank = make_rank(first, program, checkpoint.tensors, transport)
        return ParallelExecutable(rank, program, workers)
    except BaseException:
        workers.close()
        raise
