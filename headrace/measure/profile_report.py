"""The result of a profile."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.measure.experts import ExpertProfile
from headrace.measure.op_profile import OpProfile, PhaseProfile
from headrace.model.spec import ModelSpec
from headrace.planner.hardware import Machine
from headrace.planner.utilisation import StepUse
from headrace.record import frozen


@frozen(kw_only=True)
class ProfileReport:
    model: str
    spec: ModelSpec
    kv_dtype: str
    machines: Sequence[Machine]
    """Measurements before each turn and at the end."""
    machine: Machine
    """The median measurement, to which shares and limits refer."""
    profiles: Sequence[PhaseProfile]
    uses: Sequence[StepUse]
    """Use of the machine by the steps of each phase, and their predicted time."""
    skipped: Mapping[str, str]
    experts: Sequence[ExpertProfile] = ()
    """Empty for a model without experts."""

    @property
    def title(self) -> str:
        return f"{self.spec.name} on {self.machine.cpu}, {self.machine.at_work}"

    def barriers_per_layer(self, profile: PhaseProfile) -> float:
        """Barriers of one step, divided by the layers."""
        return profile.barriers / len(profile.phase.steps) / self.spec.num_layers

    def expert_loads(self) -> list[list[int]]:
        """Rows of each expert in all phases, [layers of experts, experts]."""
        total: list[list[int]] = np.sum(
            [experts.loads for experts in self.experts], axis=0
        ).tolist()
        return total

    def facts(self) -> dict[str, Any]:
        """The report as JSON: seconds, bytes, operations, and shares of 1."""
        return {
            "model": self.model,
            "name": self.spec.name,
            "layers": self.spec.num_layers,
            "kv_dtype": self.kv_dtype,
            "cpu": self.machine.cpu,
            "isa": self.machine.isa,
            "threads": self.machine.threads,
            "machine": _machine_facts(self.machine),
            "measurements": [_machine_facts(machine) for machine in self.machines],
            "phases": [
                self._phase_facts(profile) | {"use": use.facts()}
                for profile, use in zip(self.profiles, self.uses, strict=True)
            ],
            "skipped": dict(self.skipped),
            "experts": [_expert_facts(experts) for experts in self.experts],
        }

    def _phase_facts(self, profile: PhaseProfile) -> dict[str, Any]:
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
            "ops": [_op_facts(op, profile.seconds) for op in profile.ops],
        }


def _machine_facts(machine: Machine) -> dict[str, Any]:
    return {"bandwidth": machine.bandwidth, "rates": dict(machine.rates)}


def _expert_facts(experts: ExpertProfile) -> dict[str, Any]:
    return {
        "phase": experts.phase,
        "experts": experts.num_experts,
        "distinct_expected": experts.expected,
        "distinct": experts.measured,
        "max_load": experts.max_load,
        "min_load": experts.min_load,
        "loads": experts.loads.tolist(),
    }


def _op_facts(op: OpProfile, seconds: float) -> dict[str, Any]:
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
