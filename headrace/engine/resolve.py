"""The logit ops of a step, before its launch, and what becomes of its sequences, by the results."""

from collections.abc import Sequence as Results
from typing import NamedTuple

from headrace.acceptors import Acceptor
from headrace.batch import Commit, TokenLogprobs
from headrace.engine.in_flight import InFlightStep, Member, StepOps
from headrace.engine.output import TokenizerView, describe
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Request, Sequence
from headrace.errors import ConstraintError, NonFiniteLogitsError
from headrace.logit_ops import LogitOpResult, Pool, SampleResult, Score, StepResult

_NOT_FINITE = "the model produced non-finite logits"
_NOT_FINITE_ROWS = "the model produced non-finite hidden rows"

Failures = list[tuple[Request, Exception]]
"""Requests that cannot go on, each with its error. The error ends its request, never the engine."""


class Resolved(NamedTuple):
    """A sequence that goes on after a step, and what it keeps of the step."""

    seq: Sequence
    item: ScheduledSequence
    """The part of the step of this sequence, or of the one that it was forked from."""
    commit: Commit


def prepare_logit_ops(scheduled: list[ScheduledSequence], scheduler: Scheduler) -> StepOps:
    """Count the scheduled tokens as computed, fork sequences where prompts end, and collect the
    logit ops of the step.

    A finished sequence, which a static batch keeps, has no ops.
    """
    draws = StepOps()
    for source, item in enumerate(scheduled):
        seq, forks = item.seq, item.forks
        draws.seqs.append(seq)
        if seq.output.finish_reason:
            continue
        if item.scored:
            draws.first_score_row[item] = len(draws.ops)
            num_logprobs = seq.request.params.prompt_logprobs or 0
            draws.ops += [
                Score(item.first_score_row + i, seq.known[p + 1], num_logprobs)
                for i, p in enumerate(item.scored)
            ]
        if item.pooled and seq.request.pooling:
            draws.pools[item] = len(draws.ops)
            draws.ops.append(
                Pool(item.first_pooled_row, len(item.pooled), seq.request.pooling.state)
            )
        seq.computed += item.num_scheduled
        item.end = seq.computed
        if forks:
            draws.seqs += scheduler.fork(seq)[1:]
        if item.can_sample:
            drawing = draws.seqs[draws.seqs.index(seq) :] if forks else [seq]
            members = [
                Member(each, item, each.drawing(source, item.first_sample_row, item.draft))
                for each in drawing
            ]
            draws.groups.setdefault(seq.request.acceptor, []).extend(members)
    for acceptor, group in draws.groups.items():
        for i, member in enumerate(group, len(draws.ops)):
            member.seq.num_pending += 1
            member.seq.last_op = i
        draws.ops += acceptor.logit_ops([member.drawing for member in group])
    for seq in draws.seqs:
        seq.num_in_flight += 1
    return draws


def resolve_step(
    step: InFlightStep, results: Results[StepResult], scheduler: Scheduler, tokenizer: TokenizerView
) -> tuple[list[Resolved], Failures]:
    """The sequences of a step that go on and the requests that fail, by the results of its
    launches, in their order.
    """
    draws = step.ops
    resolved: list[Resolved] = []
    failures: Failures = []
    for source, item in enumerate(step.scheduled):
        if item.seq.output.finish_reason:  # ended while the step was in flight, or before it
            continue
        if item in draws.first_score_row and (
            error := _score_prompt(item, draws.first_score_row[item], results[0], tokenizer)
        ):
            failures.append((item.seq.request, error))
        elif item in draws.pools and not _pool_prompt(item, results[0].values[draws.pools[item]]):
            failures.append((item.seq.request, NonFiniteLogitsError(_NOT_FINITE_ROWS)))
        elif not item.can_sample:
            resolved.append(Resolved(item.seq, item, Commit(source, [], [], [])))
    first = len(draws.ops) - sum(map(len, draws.groups.values()))
    for acceptor, group in draws.groups.items():
        values = [
            _concatenate([result.values[i] for result in results])
            for i in range(first, first + len(group))
        ]
        first += len(group)
        for member in group:
            member.seq.num_pending -= len(results)
        if not all(member.seq.output.finish_reason for member in group):
            more, failed = _accept(acceptor, group, values, results[-1], scheduler)
            resolved += more
            failures += [(request, _nothing_drawn(request)) for request in failed]
    return resolved, failures


def _nothing_drawn(request: Request) -> Exception:
    """Why no token could be drawn."""
    if any(seq.constraint for seq in request.seqs):
        return ConstraintError(
            "the model gave none of the tokens that may follow a finite logit, or no text "
            "can follow"
        )
    return NonFiniteLogitsError(_NOT_FINITE)


def _score_prompt(
    item: ScheduledSequence, first: int, result: StepResult, tokenizer: TokenizerView
) -> Exception | None:
    """Record the prompt log-probabilities of a step; returns why its request cannot go on. `first`
    is the index of their first op.
    """
    seq = item.seq
    for position, scores in zip(item.scored, result.values[first:], strict=False):
        if not isinstance(scores, TokenLogprobs):
            return NonFiniteLogitsError(_NOT_FINITE)
        try:
            seq.request.prompt_logprobs.append(describe(tokenizer, seq.known[position + 1], scores))
        except Exception as error:  # of the tokenizer
            return error
    return None


def _pool_prompt(item: ScheduledSequence, result: LogitOpResult) -> bool:
    """Record what a step has pooled of a prompt; whether it is finite."""
    pooling = item.seq.request.pooling
    return pooling is not None and pooling.receive(len(item.pooled), result)


def _concatenate(values: list[LogitOpResult]) -> LogitOpResult:
    """What one sequence drew in several launches, up to logits that were not finite; None where
    those of the first were not.
    """
    if len(values) == 1:
        return values[0]
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for value in values:
        if not isinstance(value, SampleResult):
            break
        tokens += value.tokens
        logprobs += value.logprobs
    return SampleResult(tokens, [], logprobs) if tokens else None


def _accept(
    acceptor: Acceptor,
    group: list[Member],
    values: Results[LogitOpResult],
    result: StepResult,
    scheduler: Scheduler,
) -> tuple[list[Resolved], list[Request]]:
    """The sequences of a group that go on, with their commits, and the requests whose logits are
    not finite.

    Where the acceptor forks or frees sequences, the successors replace those that drew, in the
    request and in the scheduler.
    """
    accepted = acceptor.accept([member.drawing for member in group], values, result.logits)
    seqs = [member.seq for member in group]
    successors = sources = [seqs[which] for which, _ in accepted]
    if sources != seqs:
        successors = seqs[0].request.seqs = scheduler.replace_sequences(seqs, sources)
    pairs = [
        pair
        for pair in zip(successors, accepted, strict=True)
        if pair[0].output.finish_reason is None
    ]
    resolved = [
        Resolved(seq, group[which].item, commit)
        for seq, (which, commit) in pairs
        if commit is not None
    ]
    return resolved, [seq.request for seq, (_, commit) in pairs if commit is None]
