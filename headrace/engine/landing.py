"""What the branches that draw become: the same branches, or, where they draw together, their heirs."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.accept import Acceptor, Draw
from headrace.accept.sampler import Pool
from headrace.batch import Commit
from headrace.engine.branch import Branch, Request
from headrace.engine.scheduler import Part, Scheduler


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


def land(
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
