"""The logit ops of a step, and the commits that follow from their results."""

from collections.abc import Sequence as Results
from dataclasses import replace

from headrace.acceptors import Acceptor
from headrace.batch import Commit, TokenLogprobs
from headrace.engine.in_flight import InFlightStep
from headrace.engine.output import TokenizerView, describe
from headrace.engine.scheduled import ScheduledSequence
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Request, Sequence
from headrace.errors import ConstraintError, NonFiniteLogitsError
from headrace.logit_ops import LogitOpResult, Pool, SampleResult, Score, StepResult

_NOT_FINITE = "the model produced non-finite logits"
_NOT_FINITE_ROWS = "the model produced non-finite hidden rows"

Commits = list[tuple[ScheduledSequence, Commit]]
Failures = list[tuple[list[Sequence], Exception]]
"""Each error ends its sequences, not the engine."""


def prepare_logit_ops(step: InFlightStep, scheduler: Scheduler) -> None:
    """Collect the logit ops of a step, and count its tokens as computed.

    Forks sequences whose common prompt ends in this step.
    """
    for source, item in enumerate(step.scheduled):
        seq, forks = item.seq, item.forks
        step.seqs.append(seq)
        if seq.output.finish_reason:
            continue

        item.source = source
        if seq.request.reads_prompt_rows:
            _add_prompt_ops(step, item)
        seq.computed += item.num_scheduled
        item.end = seq.computed

        siblings = scheduler.fork(seq)[1:] if forks else []
        step.seqs += siblings
        if item.can_sample:
            acceptor = seq.request.acceptor
            if acceptor not in step.groups:
                step.groups[acceptor] = []
            group = step.groups[acceptor]
            group.append(item)
            group += [replace(item, seq=sibling) for sibling in siblings]

    for acceptor, group in step.groups.items():
        first_op = len(step.logit_ops)
        step.logit_ops += acceptor.logit_ops(group)
        step.num_ops[acceptor] = len(step.logit_ops) - first_op
        for op, item in enumerate(group, first_op):
            item.seq.num_pending += 1
            item.seq.last_op = op
    for seq in step.seqs:
        seq.num_in_flight += 1


def _add_prompt_ops(step: InFlightStep, item: ScheduledSequence) -> None:
    request = item.seq.request
    if item.scored:
        item.first_score_op = len(step.logit_ops)
        num_logprobs = request.params.prompt_logprobs or 0
        step.logit_ops += [
            Score(item.first_score_row + i, item.seq.known[position + 1], num_logprobs)
            for i, position in enumerate(item.scored)
        ]
    if item.pooled and request.pooling:
        item.pool_op = len(step.logit_ops)
        step.logit_ops.append(Pool(item.first_pooled_row, len(item.pooled), request.pooling.state))


def resolve_step(
    step: InFlightStep, results: Results[StepResult], scheduler: Scheduler, tokenizer: TokenizerView
) -> tuple[Commits, Failures]:
    commits: Commits = []
    failures: Failures = []

    # Sequences that did not sample: their prompts were scored, pooled or just computed.
    for source, item in enumerate(step.scheduled):
        if item.can_sample and not item.scored:
            continue
        if item.seq.output.finish_reason:  # it ended before the step, or while it was in flight
            continue
        if error := _resolve_prompt(item, results[0], tokenizer):
            failures.append((item.seq.request.seqs, error))
        elif not item.can_sample:
            commits.append((item, Commit(source, path=[], tokens=[], logprobs=[])))

    # Sequences that sampled, by acceptor.
    op = len(step.logit_ops) - sum(step.num_ops.values())
    for acceptor, group in step.groups.items():
        end = op + step.num_ops[acceptor]
        group_results = results[0].values[op:end]
        if len(results) > 1:
            group_results = [
                _concatenate([result.values[i] for result in results]) for i in range(op, end)
            ]
        op = end
        for item in group:
            item.seq.num_pending -= len(results)
        if not all(item.seq.output.finish_reason for item in group):
            accepted, failed = _accept(acceptor, group, group_results, results[-1], scheduler)
            commits += accepted
            failures += failed
    return commits, failures


def _resolve_prompt(
    item: ScheduledSequence, result: StepResult, tokenizer: TokenizerView
) -> Exception | None:
    if item.first_score_op is not None:
        scores = result.values[item.first_score_op :]
        if error := _record_scores(item, scores, tokenizer):
            return error
    pooling = item.seq.request.pooling
    if item.pool_op is None or pooling is None:
        return None
    is_finite = pooling.receive(len(item.pooled), result.values[item.pool_op])
    return None if is_finite else NonFiniteLogitsError(_NOT_FINITE_ROWS)


def _record_scores(
    item: ScheduledSequence, scores: Results[LogitOpResult], tokenizer: TokenizerView
) -> Exception | None:
    seq = item.seq
    for position, score in zip(item.scored, scores, strict=False):
        if not isinstance(score, TokenLogprobs):
            return NonFiniteLogitsError(_NOT_FINITE)
        try:
            logprobs = describe(tokenizer, seq.known[position + 1], score)
        except Exception as error:  # an error of the tokenizer ends the request alone
            return error
        seq.request.prompt_logprobs.append(logprobs)
    return None


def _sampling_error(request: Request) -> Exception:
    if any(seq.constraint for seq in request.seqs):
        return ConstraintError(
            "no token that the grammar allows has a finite logit, or the grammar has no "
            "continuation"
        )
    return NonFiniteLogitsError(_NOT_FINITE)


def _concatenate(results: list[LogitOpResult]) -> LogitOpResult:
    """Join the results of several launches, up to non-finite logits; None if the first are not
    finite.
    """
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for result in results:
        if not isinstance(result, SampleResult):
            break
        tokens += result.tokens
        logprobs += result.logprobs
    return SampleResult(tokens=tokens, path=[], logprobs=logprobs) if tokens else None


def _accept(
    acceptor: Acceptor,
    group: list[ScheduledSequence],
    results: Results[LogitOpResult],
    step_result: StepResult,
    scheduler: Scheduler,
) -> tuple[Commits, Failures]:
    accepted = acceptor.accept(group, results, step_result.logits)
    seqs = [item.seq for item in group]
    successors = sources = [item.seq for item, _ in accepted]
    if sources != seqs:
        successors = seqs[0].request.seqs = scheduler.replace_sequences(seqs, sources)

    commits: Commits = []
    failed: Failures = []
    for successor, (item, commit) in zip(successors, accepted, strict=True):
        if successor.output.finish_reason is not None:
            continue
        if commit is None:
            failed.append(([successor], _sampling_error(successor.request)))
        elif successor is item.seq:
            commits.append((item, commit))
        else:
            commits.append((replace(item, seq=successor), commit))
    return commits, failed
