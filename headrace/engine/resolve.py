"""What the sequences that draw become: the same sequences, or, where they draw together, their heirs."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.accept import Acceptor, Draw
from headrace.accept.sampler import Pool
from headrace.batch import Commit
from headrace.engine.output import TokenizerView
from headrace.engine.scheduler import ScheduledSequence, Scheduler
from headrace.engine.sequence import Request, Sequence
from headrace.errors import NonFiniteLogitsError

_NOT_FINITE = "the model produced non-finite logits"


class Resolved(NamedTuple):
    """A sequence that goes on, and what it keeps of its part, or of that of the sequence it was forked from."""

    seq: Sequence
    item: ScheduledSequence
    commit: Commit


class Drawing(NamedTuple):
    """A sequence that draws."""

    seq: Sequence
    item: ScheduledSequence
    draw: Draw


_Failures = list[tuple[Request, Exception]]
"""Requests that cannot go on, and why. A request can end itself, never the engine."""


def resolve_step(
    scheduled: list[ScheduledSequence], logits: NDArray[np.float32], pool: Pool, scheduler: Scheduler, tokenizer: TokenizerView
) -> tuple[list[Resolved], _Failures]:
    """What becomes of the sequences of a step with these `logits` [rows, vocab]."""
    resolved: list[Resolved] = []
    failures: _Failures = []
    drawing: dict[Acceptor, list[Drawing]] = {}
    for source, item in enumerate(scheduled):
        if item.seq.output.finish_reason:  # aborted in flight
            continue
        try:
            item.seq.score_prompt(item.num_scheduled, logits, item.first_logit, tokenizer)
        except Exception as error:
            failures.append((item.seq.request, error))
            continue
        for seq in scheduler.fork(item.seq) if item.forks else (item.seq,):
            if item.draws:
                draw = seq.draw(source, item.first_draw, item.draft)
                drawing.setdefault(seq.request.acceptor, []).append(Drawing(seq, item, draw))
            else:
                resolved.append(Resolved(seq, item, Commit(source, [], [], [])))
    for acceptor, group in drawing.items():
        landed, failed = _accept(acceptor, group, logits, pool, scheduler)
        resolved += landed
        failures += [(request, NonFiniteLogitsError(_NOT_FINITE)) for request in failed]
    return resolved, failures


def land_plain(scheduled: list[ScheduledSequence], commits: list[Commit | None]) -> tuple[list[Resolved], _Failures]:
    """What becomes of sequences that went on by themselves; None: its logits were not finite."""
    resolved: list[Resolved] = []
    failures: _Failures = []
    for item, commit in zip(scheduled, commits, strict=True):
        if commit:
            resolved.append(Resolved(item.seq, item, commit))
        else:
            failures.append((item.seq.request, NonFiniteLogitsError(_NOT_FINITE)))
    return resolved, failures


def _accept(
    acceptor: Acceptor, drawing: list[Drawing], logits: NDArray[np.float32], pool: Pool, scheduler: Scheduler
) -> tuple[list[Resolved], list[Request]]:
    """The sequences to be with their commits, and the requests whose `logits` [rows, vocab] are not finite.

    Where these are not the sequences that drew, one for one, they take their places in the request and in the scheduler.
    """
    accepted = acceptor.accept([draw for _, _, draw in drawing], logits, pool)
    seqs = [seq for seq, _, _ in drawing]
    successors = sources = [seqs[which] for which, _ in accepted]
    if sources != seqs:
        successors = seqs[0].request.seqs = scheduler.replace_sequences(seqs, sources)
    pairs = list(zip(successors, accepted, strict=True))
    landed = [Resolved(successor, drawing[which].item, commit) for successor, (which, commit) in pairs if commit is not None]
    return landed, [successor.request for successor, (_, commit) in pairs if commit is None]
