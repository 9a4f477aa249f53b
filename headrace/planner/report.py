"""A whole profile run, and what of it goes to JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.model.spec import ModelSpec
from headrace.planner.experts import ExpertProfile
from headrace.planner.hardware import Machine
from headrace.planner.profile import OpProfile, PhaseProfile
from headrace.record import frozen


@frozen
class Report:
    """The phases that ran, and the machine as it was measured before every turn and at the end."""

    model: str
    spec: ModelSpec
    kv_dtype: str
    machines: Sequence[Machine]
    machine: Machine
    """The median of these: what all shares and limits refer to."""
    profiles: Sequence[PhaseProfile]
    skipped: Mapping[str, str]
    """Phases that could not run, and why."""
    experts: Sequence[ExpertProfile] = ()
    """The routing of each phase; empty for a model without experts."""

    @property
    def title(self) -> str:
        """Model, processor and what works of it in one line."""
        return f"{self.spec.name} on {self.machine.cpu}, {self.machine.at_work}"

    def barriers_per_layer(self, profile: PhaseProfile) -> float:
        """Of one step, those around the layers included."""
        return profile.barriers / len(profile.phase.steps) / self.spec.num_layers

    def expert_loads(self) -> list[list[int]]:
        """Rows that went to each expert in all phases together, by layer of experts."""
        total: list[list[int]] = np.sum(
            [experts.loads for experts in self.experts], axis=0
        ).tolist()
        return total

    def facts(self) -> dict[str, Any]:
        """Everything with raw numbers: seconds, bytes, operations, and shares of 1."""
        return {
            "model": self.model,
            "name": self.spec.name,
            "layers": self.spec.num_layers,
            "kv_dtype": self.kv_dtype,
            "cpu": self.machine.cpu,
            "isa": self.machine.isa,
            "threads": self.machine.threads,
            "machine": _machine(self.machine),
            "measurements": [_machine(machine) for machine in self.machines],
            "phases": [self._phase(profile) for profile in self.profiles],
            "skipped": dict(self.skipped),
            "experts": [_experts(experts) for experts in self.experts],
        }

    def _phase(self, profile: PhaseProfile) -> dict[str, Any]:
        phase = profile.phase
        return {
            "name": phase.name,
            "batch": phase.seqs,
            "depth": phase.depth,
            "tokens": phase.tokens,
            "steps": len(phase.steps),
            "rounds": len(profile.walls),
            "wall": {"median": profile.wall, "min": min(profile.walls), "max": max(profile.walls)},
            "floor": profile.floor,
            "tokens_per_second": profile.tokens_per_second,
            "limit": profile.limit,
            "barriers": profile.barriers,
            "barriers_per_layer": self.barriers_per_layer(profile),
            "outside_ops": profile.outside,
            "ops": [_op(op, profile.seconds) for op in profile.ops],
        }


def _machine(machine: Machine) -> dict[str, Any]:
    return {"bandwidth": machine.bandwidth, "rates": dict(machine.rates)}


def _experts(experts: ExpertProfile) -> dict[str, Any]:
    return {
        "phase": experts.phase,
        "experts": experts.num_experts,
        "distinct_expected": experts.expected,
        "distinct": experts.measured,
        "most": experts.most,
        "least": experts.least,
        "loads": experts.loads.tolist(),
    }


def _op(op: OpProfile, seconds: float) -> dict[str, Any]:
    return {
        "op": op.name,
        "calls": op.calls,
        "seconds": op.seconds,
        "share": op.seconds / seconds,
        "bytes": op.bytes,
        "bytes_per_second": op.bytes / op.seconds if op.seconds else 0.0,
        "share_of_bandwidth": op.memory_share,
        "operations": op.flops,
        "operations_per_second": op.flops / op.seconds if op.seconds else 0.0,
        "kind": op.kind,
        "share_of_rate": op.arithmetic_share,
        "floor": op.floor,
        "link_bytes": op.link_bytes,
        "bound": op.bound,
    }
