"""Places the last step under the roofline of the machine (Williams et al. 2009).

The roofline comes from an earlier `headrace doctor` or `headrace profile`.
"""

from collections.abc import Mapping
from typing import Any

from headrace.planner import hardware
from headrace.planner.roofline import op_kind, op_seconds
from headrace.program.kv import number_bytes
from headrace.program.op import Kind, StepSize
from headrace.program.trace import Program
from headrace.remote.frames import EngineInfo


class StepRoofline:
    def __init__(self, program: Program, info: EngineInfo) -> None:
        self._program = program
        self._machine = hardware.cached_machine(info.threads, info.backend)
        self._number_bytes = number_bytes(program.kv_groups, info.kv_dtype)
        self._slot_bytes = info.kv_bytes / info.kv_tokens

    def limits(self) -> dict[str, Any] | None:
        machine = self._machine
        if machine is None:
            return None
        return {
            "cpu": machine.cpu,
            "isa": machine.isa,
            "threads": machine.threads,
            "bandwidth": machine.bandwidth,
            "rates": machine.rates,
        }

    def last_step(self, figures: Mapping[str, float]) -> dict[str, Any] | None:
        """Return bytes, operations, seconds and minimum seconds of the last step; None before
        it.

        The report lacks the rows of each sequence, so sequences get equal shares.
        """
        rows, running = int(figures.get("rows_last", 0)), int(figures.get("running", 0))
        seconds = figures.get("step_seconds", 0.0)
        if self._machine is None or not rows or not running or not seconds:
            return None

        used_bytes = figures["kv_bytes_used"] * (1 - figures["waste"])
        depth = int(used_bytes / self._slot_bytes / running)
        num_seqs = min(rows, running)
        min_rows, remainder = divmod(rows, num_seqs)
        sequences = tuple(
            (max(0, depth - min_rows), min_rows + (i < remainder)) for i in range(num_seqs)
        )
        step = StepSize(sequences, num_seqs, self._number_bytes)
        flops: dict[Kind, int] = {}
        for op in self._program.ops:
            kind = op_kind(op, step)
            flops[kind] = flops.get(kind, 0) + op.flops(step)
        return {
            "rows": rows,
            "seqs": num_seqs,
            "depth": depth,
            "bytes": sum(op.bytes(step) for op in self._program.ops),
            "flops": sum(flops.values()),
            "kind": max(flops, key=flops.__getitem__),
            "seconds": seconds,
            "least_seconds": sum(op_seconds(op, step, self._machine) for op in self._program.ops),
        }
