"""The model's own first layers and its head guess what the whole of it will draw (Zhang et al. 2024, Draft & Verify; Elhoushi et al.
2024, LayerSkip).

The short program runs over the weights and the KV of the long one. What these layers have of the context is there already; what they
write for guesses lies in slots that the step writes again, with the same numbers where the guess stays the same.
"""

from headrace.backend import Executable
from headrace.batch import NO_GUESS, BranchView, Commit, Guess, StepRows
from headrace.propose.chains import chain, grow

_MOST_ROWS = 16
"""Of known tokens without KV. At the end of a prompt there are more, and computing them twice costs more than a guess brings."""


class SelfDraft:
    """Guesses by leaving out the last layers."""

    bounded = True
    """Called in the engine's own thread only: it runs on the engine's compute threads, which serve one caller at a time."""

    def __init__(self, executable: Executable, block_size: int, depth: int, width: int, *, probabilities: bool) -> None:
        self.max_nodes = depth * width
        self._executable = executable
        self._block_size = block_size
        self.width = width
        self._probabilities = probabilities

    def propose(self, branches: list[BranchView], room: list[int]) -> list[Guess]:
        chains = {
            i: chain(branch, branch.computed, branch.table, nodes, probabilities=self._probabilities)
            for i, (branch, nodes) in enumerate(zip(branches, room, strict=True))
            if nodes > 0 and len(branch.known) - branch.computed <= _MOST_ROWS
        }
        grow(self._executable, list(chains.values()), self.width, self._block_size)
        return [chains[i].guess if i in chains else NO_GUESS for i in range(len(branches))]

    def observe(self, branches: list[BranchView], commits: list[Commit], rows: StepRows) -> None:
        pass
