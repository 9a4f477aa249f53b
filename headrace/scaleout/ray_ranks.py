"""Ranks of a replica on Ray, in the bundles of its placement group.

The replica is rank 0. Each other rank has an actor, which runs a worker process
(`parallel/hosts.py`) and a new one whenever the ranks restart.
"""

import os
import socket
from typing import Any

import ray
from ray.util import get_current_placement_group, get_node_ip_address, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.loader.ranks import RANK_COMMAND
from headrace.parallel.hosts import HostLauncher, Placement, run_worker


class RayRanks:
    """The actors of all ranks except 0. They end with this object."""

    def __init__(self, num_ranks: int, threads: int) -> None:
        """Create it in a replica whose placement group has a bundle of `threads` cores per rank,
        the first one its own.
        """
        group = get_current_placement_group()
        address = get_node_ip_address()
        place = Placement(
            rank=0, size=num_ranks, address=address, port=_free_port(address), has_store=False
        )
        nodes = set(placement_group_table(group)["bundles_to_node_id"].values())
        self.launcher: HostLauncher | None = None
        """Launcher for ranks on one node; None if they are on several, which the environment then
        describes.
        """
        if len(nodes) == 1:
            self.launcher = HostLauncher(place)
        else:
            os.environ["RANK"] = "0"
            os.environ["WORLD_SIZE"] = str(num_ranks)
            os.environ["MASTER_ADDR"] = place.address
            os.environ["MASTER_PORT"] = str(place.port)
        self._actors = [_start_actor(group, rank, threads, place) for rank in range(1, num_ranks)]


class RankActor:
    def run(self, rank: int, num_ranks: int, address: str, port: int) -> int:
        """Run the worker until rank 0, whose store is at the address, ends; returns its exit
        code.
        """
        place = Placement(rank=rank, size=num_ranks, address=address, port=port, has_store=False)
        return run_worker(place, RANK_COMMAND)


def _start_actor(group: Any, rank: int, threads: int, place: Placement) -> Any:
    options = {
        "num_cpus": threads,
        "max_restarts": -1,
        "max_task_retries": -1,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=rank
        ),
    }
    actor = ray.remote(RankActor).options(**options).remote()
    actor.run.remote(rank, place.size, place.address, place.port)
    return actor


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
