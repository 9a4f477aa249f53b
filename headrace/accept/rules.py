"""Rules of acceptance by name, and the acceptor that goes by one."""

import numpy as np
from numpy.typing import NDArray

from headrace.accept import Accepted, AnyLine, Draw
from headrace.accept.descend import Descent, Rule, descend
from headrace.accept.rejection import reject
from headrace.accept.sampler import Pool
from headrace.accept.typical import typical
from headrace.batch import Commit
from headrace.config import Acceptance

RULES: dict[Acceptance, Rule] = {"descend": descend, "rejection": reject, "typical": typical}


class Separately:
    """The acceptor of all branches that go on each by itself."""

    joint = False

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def accept(self, draws: list[Draw], logits: NDArray[np.float32], pool: Pool) -> list[Accepted]:
        """One commit for each draw, in their order."""
        descents = [Descent(Commit(d.source, [], [], []), d.sampler, d.guess, d.row, len(d.known), d.num_logprobs) for d in draws]
        failed = self._rule(descents, logits, pool)
        return [Accepted(i, None if d.commit.source in failed else d.commit) for i, d in enumerate(descents)]

    def outputs(self, lines: list[AnyLine]) -> list[AnyLine]:
        """All of them, as they are."""
        return lines
