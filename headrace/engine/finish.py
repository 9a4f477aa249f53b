"""The end of sequences, which frees their blocks."""

from collections.abc import Iterable

from headrace.batch import Commit
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Request, Sequence
from headrace.outputs import FinishReason


def receive_tokens(seq: Sequence, commit: Commit, scheduler: Scheduler) -> int:
    """Append new tokens, and return their number; 0 for beams.

    An error of the tokenizer or the grammar fails the sequence; its siblings continue.
    """
    output = seq.output
    if not commit.tokens:
        if seq.has_read_prompt and output.finish_reason is None:
            output.finish("stop")
            scheduler.drop(seq)
        return 0
    if output.finish_reason:  # its request may have failed
        return 0

    num_before = len(output.token_ids)
    has_ended = False
    try:
        has_ended = seq.receive(commit)
    except Exception as error:
        fail_sequences(seq.request.seqs if seq.is_beam else [seq], error, scheduler)
    if has_ended:
        scheduler.drop(seq)
    return 0 if seq.is_beam else len(output.token_ids) - num_before


def finish_request(request: Request, reason: FinishReason, scheduler: Scheduler) -> None:
    for seq in request.seqs:
        if seq.output.finish_reason is None:
            try:
                seq.output.finish(reason)
            except Exception as error:  # an error of the tokenizer
                return fail_request(request, error, scheduler)
            scheduler.drop(seq)


def fail_request(request: Request, error: Exception, scheduler: Scheduler) -> None:
    fail_sequences(request.seqs, error, scheduler)


def fail_sequences(seqs: Iterable[Sequence], error: Exception, scheduler: Scheduler) -> None:
    for seq in seqs:
        if seq.output.finish_reason is None:
            seq.request.errors[seq.seq_id[1]] = error
            seq.output.fail(str(error))
            scheduler.drop(seq)
