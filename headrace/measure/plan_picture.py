"""Pictures of a plan: the parts of memory, the time per token against the batch, the roofline."""

from headrace.batch import StepTimes
from headrace.measure.batch_curve import batch_curve
from headrace.measure.batch_picture import batch_svg
from headrace.measure.op_profile import PhaseProfile, account_phase, decode_phase, prefill_phase
from headrace.measure.plan import Plan
from headrace.measure.roofline_picture import roofline_svg
from headrace.planner.memory_picture import MemoryPart, memory_svg
from headrace.planner.svg import stack


def plan_svg(found: Plan) -> str:
    """Draw an SVG document with the three pictures, one below the other."""
    place, work, fit = found.place, found.workload, found.fit
    ranks = f"{place.mesh.ranks} x " if place.mesh.ranks > 1 else ""
    where = f"{ranks}{place.title}"
    memory = memory_svg(
        f"Memory of {found.model}",
        f"A device of {where}; {work.batch:,} sequences of {fit.context:,} tokens",
        memory_parts(found),
        fit.memory,
    )
    batches = batch_svg(
        f"Time per token of {found.model}",
        f"{where}, {found.format}, depth {work.depth:,}; labels are tokens/s of all sequences. "
        "At the knee a step takes twice the time of one sequence",
        batch_curve(found),
    )
    roofline = roofline_svg(
        f"Roofline of {found.model}",
        place.machine,
        roofline_phases(found),
        f"{where}; predicted by kernels measured on {place.reaches.source.partition(',')[0]}",
    )
    return stack(f"Plan of {found.model}", [memory, batches, roofline])


def memory_parts(found: Plan) -> list[MemoryPart]:
    """What holds the memory of the fullest device; the rest is free."""
    if run := found.run_memory:
        return [
            MemoryPart("weights", run.weights),
            MemoryPart("KV", run.kv + run.kv_ahead),
            MemoryPart("activations", run.activations),
            MemoryPart("engine", run.base),
            MemoryPart("tokenizer", run.tokenizer),
        ]
    fit = found.fit
    return [
        MemoryPart("weights", fit.weights),
        *([MemoryPart("adapter", fit.adapter)] if fit.adapter else []),
        MemoryPart("KV", found.workload.batch * fit.kv_per_sequence),
        MemoryPart("runtime", fit.to_run),
    ]


def roofline_phases(found: Plan) -> list[PhaseProfile]:
    """Predicted ops of the slowest stage: a prompt, and steps of one sequence and of the batch."""
    work, kv_bytes = found.workload, found.kv_bytes
    batches = dict.fromkeys([1, -(-work.batch // len(found.stages))])
    phases = [decode_phase(work.depth, batch, kv_bytes) for batch in batches]
    profiles = []
    for phase in [prefill_phase(work.prompt, kv_bytes), *phases]:
        stage = found.timer.slowest(phase.steps[0])
        rounds = [
            StepTimes(wall=sum(ops.values()), ops=ops, barriers=0)
            for step in phase.steps
            for ops in [found.timer.op_seconds(step, stage)]
        ]
        program = found.stages[stage]
        profiles.append(account_phase(phase, program, found.place.machine, [rounds]))
    return profiles
