"""The ranks of a replica as actors, in the bundles of its placement group: the replica itself is
rank 0, and an actor each of the others.

An actor runs nothing itself: it has a process follow rank 0 (`parallel/hosts.py`), another one
whenever the ranks are started again. Ray starts the actor again if it goes away, and ends it with
the replica.
"""

import os
import socket
from typing import Any

import ray
from ray.util import get_current_placement_group, get_node_ip_address, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.loader.ranks import RANK_COMMAND
from headrace.parallel.hosts import HostLauncher, Placement, follow_rank_0


class RayRanks:
    """The actors of all ranks but the first, for as long as this is kept."""

    def __init__(self, num_ranks: int, threads: int) -> None:
        """To be made in the replica, which has a bundle of so many cores for each rank, its own
        first.
        """
        group = get_current_placement_group()
        address = get_node_ip_address()
        place = Placement(0, num_ranks, address, _free_port(address), has_store=False)
        nodes = set(placement_group_table(group)["bundles_to_node_id"].values())
        self.launcher: HostLauncher | None = None
        """Receives the processes of the actors, where they share the memory of this machine; else
        the environment has it made.
        """
        if len(nodes) == 1:
            self.launcher = HostLauncher(place)
        else:
            named = {
                "RANK": 0,
                "WORLD_SIZE": num_ranks,
                "MASTER_ADDR": place.address,
                "MASTER_PORT": place.port,
            }
            os.environ.update({name: str(value) for name, value in named.items()})
        self._actors = [self._start(group, rank, threads, place) for rank in range(1, num_ranks)]

    def _start(self, group: Any, rank: int, threads: int, place: Placement) -> Any:
        bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        options = {
            "num_cpus": threads,
            "max_restarts": -1,
            "max_task_retries": -1,
            "scheduling_strategy": bundle,
        }
        actor = ray.remote(Follower).options(**options).remote()
        actor.follow.remote(rank, place.size, place.address, place.port)
        return actor


class Follower:
    """A rank that is not the first."""

    def follow(self, rank: int, num_ranks: int, address: str, port: int) -> int:
        """Follow rank 0, which has a store there, to its end; returns the exit code."""
        return follow_rank_0(
            Placement(rank, num_ranks, address, port, has_store=False), RANK_COMMAND
        )


def _free_port(address: str) -> int:
    with socket.socket() as asking:
        asking.bind((address, 0))
        return int(asking.getsockname()[1])
