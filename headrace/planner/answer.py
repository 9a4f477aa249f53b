"""The least time in which a machine can have decoded one answer: that of the steps which it took,
each at its limit.
"""

from headrace.outputs import RequestOutput
from headrace.planner.hardware import Machine
from headrace.planner.roofline import step_seconds
from headrace.program.op import StepSize
from headrace.program.trace import Program


def decode_steps(
    result: RequestOutput, kv_bytes: float, beam_width: int | None = None
) -> list[tuple[float, StepSize]]:
    """The steps after that of the first token: how many there were of each size. No other request
    took part in them.

    Drafts make fewer steps, of more rows. A result says how many of each there were in all, so the
    steps are those of these numbers that take the least time: sequences of one length, drafts of
    one size (or two that differ by a row), contexts of the mean length.
    """
    num_outputs, stats = len(result.outputs), result.drafts.values()
    num_tokens = sum(len(output.token_ids) for output in result.outputs) / num_outputs
    steps = max(
        0.0, num_tokens - 1 - sum(s.accepted for s in stats) / num_outputs
    )  # each gives a token beside the accepted ones
    num_drafts, num_rows = sum(s.steps for s in stats), sum(s.proposed for s in stats)
    drafted = min(
        steps, num_drafts / num_outputs
    )  # the step of the first token may have had a draft, too
    size, larger = divmod(num_rows, max(1, num_drafts))
    share = larger / max(1, num_drafts)
    context, num_seqs = (
        len(result.prompt_token_ids) + round(num_tokens / 2),
        beam_width or num_outputs,
    )

    def step(rows: int) -> StepSize:
        return StepSize(((context, rows),) * num_seqs, num_seqs * rows, kv_bytes)

    counts = ((steps - drafted, 1), (drafted * (1 - share), 1 + size), (drafted * share, 2 + size))
    return [(count, step(rows)) for count, rows in counts if count > 0]


def decode_seconds(
    program: Program, machine: Machine, sizes: list[tuple[float, StepSize]]
) -> float:
    """Least seconds of so many steps of these loads."""
    return sum(count * step_seconds(program, step, machine) for count, step in sizes)
