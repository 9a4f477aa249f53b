"""Jump-forward: the tokens of an output that are certain, because a mask leaves no other, are its
draft.

So one step takes all of them, and each is still drawn from a row of logits, as ever: nothing but
the number of steps depends on it. No proposer is asked for such a sequence, and what is certain
says nothing about proposers.
"""

from headrace.batch import Commit, DraftTree
from headrace.engine.scheduled import ScheduledSequence


class JumpForward:
    """Finds the tokens that are certain, `most` of a sequence in a step at the most, and counts
    them; with 0 there are none.
    """

    def __init__(self, most: int) -> None:
        self.num_accepted = 0
        """Tokens that came without a step of their own."""
        self._most = most

    def find(self, scheduled: list[ScheduledSequence]) -> dict[ScheduledSequence, int]:
        """Note in each sequence of a step what is certain to follow; returns how many tokens that
        is.
        """
        able = [
            item
            for item in scheduled
            if item.seq.has_changing_mask and item.seq.output.finish_reason is None
        ]
        for item in able:
            if item.seq.constraint and (useful := min(self._most, item.max_useful_draft)) > 0:
                item.certain = item.seq.constraint.certain(useful)
        return {item: len(item.certain) for item in able if item.certain}

    def draft(self, items: dict[ScheduledSequence, int]) -> None:
        """Make a draft of the certain tokens of each sequence, as many as the budget that it was
        granted has room for.
        """
        for item in items:
            item.certain = item.certain[: item.draft_budget]
            item.draft = DraftTree(item.certain, list(range(-1, len(item.certain) - 1)))

    def count(self, item: ScheduledSequence, commit: Commit) -> int:
        """Count the certain tokens of a commit; returns how many of its draft tokens these are."""
        accepted = len(commit.path) if item.certain else 0
        self.num_accepted += accepted
        return accepted
