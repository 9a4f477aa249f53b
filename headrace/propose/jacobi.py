"""Jacobi decoding: guesses are what the model itself said in the last step, below guesses that were wrong.

The rows of a chain are all computed at once, each from the guess before it; their likeliest tokens are the chain of the next
step, and settle from left to right into what plain decoding gives (Santilli et al. 2023).
"""

from weakref import WeakKeyDictionary

from headrace.batch import BranchView, Commit, Guess, StepRows


class Jacobi:
    """Guesses by iteration; one look at the logits of each guess row."""

    bounded = True
    needs_rows = True

    def __init__(self, max_nodes: int = 16) -> None:
        self.max_nodes = max_nodes
        self._chains: WeakKeyDictionary[BranchView, list[int]] = WeakKeyDictionary()

    def propose(self, branches: list[BranchView], room: list[int]) -> list[Guess]:
        return [self._guess(branch, nodes) for branch, nodes in zip(branches, room, strict=True)]

    def observe(self, branches: list[BranchView], commits: list[Commit], rows: StepRows) -> None:
        for commit in commits:
            if commit.tokens and commit.guess.tokens:
                # The first rows led to the new tokens. The next one is that of the first wrong guess, and says what follows it.
                first, end = commit.row + 1 + len(commit.path), commit.row + 1 + len(commit.guess.tokens)
                self._chains[branches[commit.source]] = rows.logits[first:end].argmax(axis=1).tolist()

    def _guess(self, branch: BranchView, room: int) -> Guess:
        # Any tokens do to begin with; those of the text itself are at least of its kind.
        chain = [*self._chains.pop(branch, ()), *branch.known[:room]][:room]
        return Guess(chain, list(range(-1, len(chain) - 1)))
