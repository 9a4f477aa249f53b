"""Sums over all steps, of which their costs follow (`planner/utilisation.py`)."""

from dataclasses import dataclass, field

from headrace.engine.in_flight import InFlightStep
from headrace.stats import StepTotals


@dataclass(slots=True)
class _Sums:
    """A `StepTotals` that grows."""

    seconds: float = 0.0
    steps: int = 0
    seqs: int = 0
    rows: int = 0
    context: int = 0
    prompts: int = 0
    prompt_rows: int = 0
    prompt_context: int = 0
    logit_rows: int = 0
    tokens: int = 0

    def totals(self) -> StepTotals:
        return StepTotals._make([getattr(self, name) for name in StepTotals._fields])


@dataclass(slots=True)
class StepSums:
    """Sums of the steps with a prompt, and of the steps that only decode.

    The reader of the sums does the arithmetic.
    """

    decode: _Sums = field(default_factory=_Sums)
    prompt: _Sums = field(default_factory=_Sums)

    def record(self, step: InFlightStep, seconds: float, num_tokens: int) -> None:
        """Add a finished step, which gave `num_tokens` output tokens."""
        seqs, launches = len(step.scheduled), len(step.tickets)
        if step.num_rows == seqs:  # a row of each sequence
            sums = self.decode
            sums.seqs += launches * seqs
            sums.rows += launches * seqs
            sums.logit_rows += launches * seqs
            # Each launch has a token of context more than the launch before.
            before = sum([item.end for item in step.scheduled]) - seqs
            sums.context += launches * before + seqs * (launches * (launches - 1) // 2)
        else:
            is_prompt = any([item.num_scheduled > 1 for item in step.scheduled])
            sums = self.prompt if is_prompt else self.decode
            _add_sequences(sums, step)
        sums.seconds += seconds
        sums.steps += launches
        sums.tokens += num_tokens


def _add_sequences(sums: _Sums, step: InFlightStep) -> None:
    for item in step.scheduled:
        rows = item.num_scheduled + len(item.draft.tokens)
        context = max(0, item.end - item.num_scheduled)  # the end of padding is 0
        if item.num_scheduled > 1:
            sums.prompts += 1
            sums.prompt_rows += rows
            sums.prompt_context += context
        else:
            sums.seqs += 1
            sums.rows += rows
            sums.context += context
        sums.logit_rows += len(item.scored)
        if item.can_sample:
            sums.logit_rows += 1 + len(item.draft.tokens)
