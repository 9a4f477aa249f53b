"""How sequences end: by their tokens, by an end of their request, or by an error. What they hold is
free afterwards.
"""

from headrace.batch import Commit
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Request, Sequence
from headrace.request import FinishReason


def receive(seq: Sequence, commit: Commit, scheduler: Scheduler) -> int:
    """Let a sequence have its new tokens, and end it where they say so; an error of the tokenizer
    is one of its request.

    A prompt that is embedded has none, and ends once its rows have been pooled. Returns how many
    tokens its output has got; none of a beam, since which beams are answers is known at the end.
    """
    if (
        seq.request.pooling
        and seq.request.pooling.vector is not None
        and seq.output.finish_reason is None
    ):
        seq.output.finish("stop")
        scheduler.drop(seq)
        return 0
    if not commit.tokens or seq.output.finish_reason:  # its request may have failed
        return 0
    before, has_ended = len(seq.output.token_ids), False
    try:
        has_ended = seq.receive(commit)
    except Exception as error:
        fail(seq.request, error, scheduler)
    if has_ended:
        scheduler.drop(seq)
    return 0 if seq.request.acceptor.is_group else len(seq.output.token_ids) - before


def end(request: Request, reason: FinishReason, scheduler: Scheduler) -> None:
    """End the sequences of a request that still run or wait."""
    for seq in request.seqs:
        if seq.output.finish_reason is None:
            try:
                seq.output.finish(reason)
            except Exception as error:  # of the tokenizer
                return fail(request, error, scheduler)
            scheduler.drop(seq)


def fail(request: Request, error: Exception, scheduler: Scheduler) -> None:
    """End the sequences of a request that still run or wait with an error."""
    for seq in request.seqs:
        if seq.output.finish_reason is None:
            request.error = request.error or error
            seq.output.fail(str(error))
            scheduler.drop(seq)
