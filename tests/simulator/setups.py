"""Replicas of a toy model whose steps take a fixed time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import EngineLimits
from headrace.program.op import StepSize
from headrace.simulator.events import Served, Simulation
from headrace.simulator.replica import Replica, ReplicaSetup
from headrace.simulator.routers import RoundRobin
from headrace.simulator.trace import Trace
from headrace.simulator.vocabulary import VOCAB_SIZE
from tests.engine.toy import FULL, toy_groups


class FlatCosts:
    """Steps that take these seconds in their stages."""

    def __init__(self, *stages: float, host: float = 0.0, request: float = 0.0) -> None:
        self._stages = stages or (1.0,)
        self.schedule_seconds = host
        self.request_seconds = request

    def stage_seconds(self, step: StepSize) -> Sequence[float]:
        return self._stages

    def host_seconds(self, step: StepSize) -> float:
        return 0.0


def setup(**fields: Any) -> ReplicaSetup:
    limits = EngineLimits(VOCAB_SIZE, 512, KvConfig((64,), 16), toy_groups(FULL))
    base = ReplicaSetup(limits=limits, config=EngineConfig(), costs=FlatCosts(), kv_bytes=2.0)
    return replace(base, **fields)


def run(trace: Trace, one: ReplicaSetup, count: int = 1) -> list[Served]:
    replicas = [Replica(one, number) for number in range(count)]
    return Simulation(RoundRobin(count), replicas, trace).run()
