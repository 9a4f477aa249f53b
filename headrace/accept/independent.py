"""Rules of acceptance by name, and the acceptor that goes by one."""

import numpy as np
from numpy.typing import NDArray

from headrace.accept import Accepted, AnyOutput, Draw
from headrace.accept.exact import Rule, Verification, verify_exact
from headrace.accept.rejection import verify_rejection
from headrace.accept.sampler import Pool
from headrace.accept.typical import verify_typical
from headrace.batch import Commit
from headrace.config import AcceptanceMethod

METHODS: dict[AcceptanceMethod, Rule] = {"exact": verify_exact, "rejection": verify_rejection, "typical": verify_typical}


class IndependentAcceptor:
    """The acceptor of all sequences that go on each by itself."""

    is_group = False

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def accept(self, draws: list[Draw], logits: NDArray[np.float32], pool: Pool) -> list[Accepted]:
        """One commit for each draw, in their order."""
        verifications = [Verification(Commit(d.source, [], [], []), d.sampler, d.draft, d.row, len(d.known), d.num_logprobs) for d in draws]
        failed = self._rule(verifications, logits, pool)
        return [Accepted(i, None if d.commit.source in failed else d.commit) for i, d in enumerate(verifications)]

    def outputs(self, lines: list[AnyOutput]) -> list[AnyOutput]:
        """All of them, as they are."""
        return lines
