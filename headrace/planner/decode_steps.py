from headrace.outputs import RequestOutput
from headrace.planner.hardware import Machine
from headrace.planner.roofline import step_seconds
from headrace.program.op import StepSize
from headrace.program.trace import Program


def decode_steps(
    result: RequestOutput, kv_bytes: float, beam_width: int | None = None
) -> list[tuple[float, StepSize]]:
    """The steps after the first token, as numbers of steps of each size.

    A result has only totals: the sizes take the least time for them.
    """
    num_outputs, drafts = len(result.outputs), result.drafts.values()
    num_tokens = sum(len(output.token_ids) for output in result.outputs) / num_outputs
    context = len(result.prompt_token_ids) + round(num_tokens / 2)
    num_seqs = beam_width or num_outputs

    # Each step gives one token besides the accepted draft tokens.
    num_accepted = sum(stats.accepted for stats in drafts)
    num_steps = max(0.0, num_tokens - 1 - num_accepted / num_outputs)
    num_drafts = sum(stats.steps for stats in drafts)
    num_draft_rows = sum(stats.proposed for stats in drafts)
    # The step of the first token may have had a draft, too.
    num_drafted = min(num_steps, num_drafts / num_outputs)
    draft_size, num_larger = divmod(num_draft_rows, max(1, num_drafts))
    larger_share = num_larger / max(1, num_drafts)

    def step(rows: int) -> StepSize:
        return StepSize(((context, rows),) * num_seqs, num_seqs * rows, kv_bytes)

    counts = (
        (num_steps - num_drafted, 1),
        (num_drafted * (1 - larger_share), 1 + draft_size),
        (num_drafted * larger_share, 2 + draft_size),
    )
    return [(count, step(rows)) for count, rows in counts if count > 0]


def decode_seconds(
    program: Program, machine: Machine, steps: list[tuple[float, StepSize]]
) -> float:
    return sum(count * step_seconds(program, step, machine) for count, step in steps)
