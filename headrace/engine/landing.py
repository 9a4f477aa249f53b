"""What the branches that draw become: the same branches, or, where they draw together, their heirs."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.accept import Acceptor, Draw
from headrace.accept.sampler import Pool
from headrace.batch import Commit
from headrace.engine.branch import Branch, Request
from headrace.engine.output import TokenizerView
from headrace.engine.scheduler import Part, Scheduler
from headrace.errors import NonFiniteLogitsError

_NOT_FINITE = "the model produced non-finite logits"


class Landing(NamedTuple):
    """A branch that goes on, and what it keeps of its part, or of that of the branch it was forked from."""

    branch: Branch
    part: Part
    commit: Commit


class Drawing(NamedTuple):
    """A branch that draws."""

    branch: Branch
    part: Part
    draw: Draw


_Failures = list[tuple[Request, Exception]]
"""Requests that cannot go on, and why. A request can end itself, never the engine."""


def land(
    parts: list[Part], logits: NDArray[np.float32], pool: Pool, scheduler: Scheduler, tokenizer: TokenizerView
) -> tuple[list[Landing], _Failures]:
    """What becomes of the branches of a step with these `logits` [rows, vocab]."""
    landing: list[Landing] = []
    failures: _Failures = []
    drawing: dict[Acceptor, list[Drawing]] = {}
    for source, part in enumerate(parts):
        if part.branch.output.finish_reason:  # aborted in flight
            continue
        try:
            part.branch.score_prompt(part.forced, logits, part.first_logit, tokenizer)
        except Exception as error:
            failures.append((part.branch.request, error))
            continue
        for branch in scheduler.fork(part.branch) if part.forks else (part.branch,):
            if part.draws:
                draw = branch.draw(source, part.first_draw, part.guess)
                drawing.setdefault(branch.request.acceptor, []).append(Drawing(branch, part, draw))
            else:
                landing.append(Landing(branch, part, Commit(source, [], [], [])))
    for acceptor, group in drawing.items():
        landed, failed = _accept(acceptor, group, logits, pool, scheduler)
        landing += landed
        failures += [(request, NonFiniteLogitsError(_NOT_FINITE)) for request in failed]
    return landing, failures


def land_plain(parts: list[Part], commits: list[Commit | None]) -> tuple[list[Landing], _Failures]:
    """What becomes of branches that went on by themselves; None: its logits were not finite."""
    landing: list[Landing] = []
    failures: _Failures = []
    for part, commit in zip(parts, commits, strict=True):
        if commit:
            landing.append(Landing(part.branch, part, commit))
        else:
            failures.append((part.branch.request, NonFiniteLogitsError(_NOT_FINITE)))
    return landing, failures


def _accept(
    acceptor: Acceptor, drawing: list[Drawing], logits: NDArray[np.float32], pool: Pool, scheduler: Scheduler
) -> tuple[list[Landing], list[Request]]:
    """The branches to be with their commits, and the requests whose `logits` [rows, vocab] are not finite.

    Where these are not the branches that drew, one for one, they take their places in the request and in the scheduler.
    """
    accepted = acceptor.accept([draw for _, _, draw in drawing], logits, pool)
    branches = [branch for branch, _, _ in drawing]
    heirs = sources = [branches[which] for which, _ in accepted]
    if sources != branches:
        heirs = branches[0].request.branches = scheduler.succeed(branches, sources)
    pairs = list(zip(heirs, accepted, strict=True))
    landed = [Landing(heir, drawing[which].part, commit) for heir, (which, commit) in pairs if commit is not None]
    return landed, [heir.request for heir, (_, commit) in pairs if commit is None]
