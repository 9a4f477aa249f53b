"""Mesh and threads of an `EngineConfig`. Importing this needs no torch."""

import os
from collections.abc import Mapping
from importlib.util import find_spec

from headrace.backend import lower_program
from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.parallel.mesh import Mesh, weights_of
from headrace.planner.host import usable_cores
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor


def mesh_of(config: EngineConfig) -> Mesh:
    """Return the mesh. Raises RequestError if the backend runs one rank or torch is missing."""
    mesh = Mesh(
        tensor=config.tensor_parallel_size,
        pipeline=config.pipeline_parallel_size,
        shares_experts=config.enable_expert_parallel,
        sequence=config.enable_sequence_parallel,
        layers=config.pipeline_layers,
    )
    if mesh.ranks > 1 and not config.traits.has_ranks:
        raise RequestError(
            f"backend '{config.backend}' runs a single rank; choose backend cpu or cuda, or "
            "parallel sizes of 1"
        )
    if mesh.ranks > 1 and find_spec("torch") is None:
        raise RequestError(
            f"{mesh.ranks} ranks need the package torch; run pip install 'headrace[distributed]'"
        )
    return mesh


def threads_per_rank(config: EngineConfig, mesh: Mesh) -> int:
    return config.threads or max(1, usable_cores() // mesh.ranks)


def rank_programs(
    config: EngineConfig, program: Program, tensors: Mapping[str, StoredTensor]
) -> list[Program]:
    mesh = mesh_of(config)
    shards = [mesh.program(program, rank) for rank in range(mesh.ranks)]
    return [lower_program(config.backend, shard, weights_of(shard, tensors)) for shard in shards]


def ranks_of_host(mesh: Mesh) -> int:
    """Return the number of ranks on this host, each with a GPU of its own."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_multi_host(mesh) else mesh.ranks


def local_rank(mesh: Mesh, rank: int) -> int:
    """Return the number of a rank among the ranks of its host: the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0")) if is_multi_host(mesh) else rank


def is_multi_host(mesh: Mesh) -> bool:
    """Return whether a launcher such as torchrun started the ranks.

    Raises RequestError if the numbers of processes and ranks differ.
    """
    if mesh.ranks == 1:
        return False
    from headrace.parallel.hosts import placement  # imports torch

    place = placement()
    if place and place.size not in (1, mesh.ranks):
        raise RequestError(
            f"the environment has {place.size} ranks, but tensor_parallel_size {mesh.tensor} x "
            f"pipeline_parallel_size {mesh.pipeline} is {mesh.ranks}; start one process per rank"
        )
    return bool(place and place.size > 1)
