"""Where the engine's last step stands under the roofline of its machine (Williams et al. 2009),
from figures that are there already.

Nothing is measured for it: without an earlier measurement of the machine (`headrace doctor`,
`headrace profile`) there is no roofline.
"""

from collections.abc import Mapping
from typing import Any

from headrace.planner import hardware
from headrace.planner.roofline import op_kind, op_seconds
from headrace.program.kv import number_bytes
from headrace.program.op import Kind, StepSize
from headrace.program.trace import Program
from headrace.remote.frames import Hello


class Roofline:
    """The limits of one model on one machine."""

    def __init__(self, program: Program, hello: Hello) -> None:
        self._program = program
        self._machine = hardware.remembered(hello.threads, hello.backend)
        self._number_bytes = number_bytes(program.kv_groups, hello.kv_dtype)
        self._slot_bytes = hello.kv_bytes / hello.kv_tokens

    def limits(self) -> dict[str, Any] | None:
        """What was measured of the machine, in bytes and operations per second; None where nothing
        was.
        """
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

    def standing(self, figures: Mapping[str, float]) -> dict[str, Any] | None:
        """Bytes, operations and seconds of the last step, and the least seconds it could have
        taken; None where none has run.

        `figures`: those of a report. They do not say how the rows of the step were dealt out: the
        same number of rows is taken for each running sequence, and the mean of their contexts.
        """
        rows, running, seconds = (
            int(figures.get("rows_last", 0)),
            int(figures.get("running", 0)),
            figures.get("step_seconds", 0.0),
        )
        if self._machine is None or not rows or not running or not seconds:
            return None
        depth = int(figures["kv_bytes_used"] * (1 - figures["waste"]) / self._slot_bytes / running)
        seqs = min(rows, running)
        each, more = divmod(rows, seqs)
        spread = tuple((max(0, depth - each), each + (i < more)) for i in range(seqs))
        step = StepSize(spread, seqs, self._number_bytes)
        flops: dict[Kind, int] = {}
        for op in self._program.ops:
            kind = op_kind(op, step)
            flops[kind] = flops.get(kind, 0) + op.flops(step)
        return {
            "rows": rows,
            "seqs": seqs,
            "depth": depth,
            "bytes": sum(op.bytes(step) for op in self._program.ops),
            "flops": sum(flops.values()),
            "kind": max(flops, key=flops.__getitem__),
            "seconds": seconds,
            "least_seconds": sum(op_seconds(op, step, self._machine) for op in self._program.ops),
        }
