"""Ways of guessing by name, and the guard that keeps a bad one from doing harm."""

import operator

from headrace.batch import NO_GUESS, BranchView, Commit, Guess, Proposer, StepRows
from headrace.errors import RequestError
from headrace.propose.ngram import Ngram
from headrace.propose.off import Off

PROPOSERS: dict[str, type[Off] | type[Ngram]] = {"off": Off, "ngram": Ngram}


def make_proposer(name: str) -> Proposer:
    """A new proposer. Raises RequestError for a name that is not in PROPOSERS."""
    if name not in PROPOSERS:
        raise RequestError(f"unknown proposer {name!r}; there are: {', '.join(PROPOSERS)}")
    return PROPOSERS[name]()


class Guard:
    """A proposer around another. What the inner one raises, or returns that is no guess tree, becomes no guess, and counts."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self.max_nodes = proposer.max_nodes
        self.failures = 0
        self._proposer = proposer
        self._vocab_size = vocab_size

    def propose(self, branches: list[BranchView], room: list[int]) -> list[Guess]:
        """A sound guess for each branch; those without room are not asked for."""
        guesses = [NO_GUESS] * len(branches)
        asked = [i for i, nodes in enumerate(room) if nodes > 0]
        if not asked:
            return guesses
        try:
            proposed = self._proposer.propose([branches[i] for i in asked], [room[i] for i in asked])
            pairs = list(zip(asked, proposed, strict=True))
        except Exception:  # whatever a proposer does wrong, the step goes on
            self.failures += 1
            return guesses
        for i, guess in pairs:
            guesses[i] = self._checked(guess, room[i])
        return guesses

    def observe(self, branches: list[BranchView], commits: list[Commit], rows: StepRows) -> None:
        """Pass it on."""
        try:
            self._proposer.observe(branches, commits, rows)
        except Exception:
            self.failures += 1

    def _checked(self, guess: Guess, room: int) -> Guess:
        try:
            tokens, parents = [operator.index(t) for t in guess.tokens], [operator.index(p) for p in guess.parents]
            sound = (
                len(tokens) == len(parents) <= room
                and all(0 <= token < self._vocab_size for token in tokens)
                and all(-1 <= parent < node for node, parent in enumerate(parents))
            )
        except Exception:
            sound = False
        if not sound:
            self.failures += 1
        return Guess(tokens, parents) if sound else NO_GUESS
