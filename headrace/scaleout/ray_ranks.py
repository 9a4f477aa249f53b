"""Ranks of a replica on Ray, in its placement group. The replica is rank 0."""

import os
import socket
from typing import Any

import ray
from ray.util import get_current_placement_group, get_node_ip_address, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.loader.ranks import RANK_COMMAND
from headrace.parallel.hosts import HostLauncher, Placement, run_worker


class RayRanks:
    def __init__(self, num_ranks: int, threads: int) -> None:
        """Create it in a replica whose placement group has a bundle of `threads` cores per rank."""
        group = get_current_placement_group()
        address = get_node_ip_address()
        place = Placement(
            rank=0, size=num_ranks, address=address, port=_free_port(address), has_store=False
        )
        nodes = set(placement_group_table(group)["bundles_to_node_id"].values())
        self.launcher: HostLauncher | None = None
        """Launcher for ranks on one node; None if the environment describes several nodes."""
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
        """Returns the worker's exit code."""
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
