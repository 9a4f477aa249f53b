"""No guesses: plain decoding."""

from headrace.batch import NO_GUESS, BranchView, Commit, Guess, StepRows


class Off:
    """Never guesses."""

    max_nodes = 0

    def propose(self, branches: list[BranchView], room: list[int]) -> list[Guess]:
        return [NO_GUESS] * len(branches)

    def observe(self, branches: list[BranchView], commits: list[Commit], rows: StepRows) -> None:
        pass
