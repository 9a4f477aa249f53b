"""Jump-forward decoding: tokens that the grammar forces become drafts. Each is still sampled."""

from headrace.batch import Commit, DraftTree
from headrace.engine.scheduled import ScheduledSequence


class JumpForward:
    """Drafts up to `max_tokens` forced tokens of a sequence in a step; 0 turns it off."""

    def __init__(self, max_tokens: int) -> None:
        self.num_accepted = 0
        self._max_tokens = max_tokens

    def find(self, scheduled: list[ScheduledSequence]) -> dict[ScheduledSequence, int]:
        num_forced: dict[ScheduledSequence, int] = {}
        for item in scheduled:
            seq = item.seq
            if not seq.has_changing_mask:
                continue
            max_tokens = min(self._max_tokens, item.max_useful_draft)
            if seq.constraint and max_tokens > 0:
                item.forced = seq.constraint.forced(max_tokens)
            if item.forced:
                num_forced[item] = len(item.forced)
        return num_forced

    def draft(self, items: dict[ScheduledSequence, int]) -> None:
        for item in items:
            item.forced = item.forced[: item.draft_budget]
            item.draft = DraftTree(item.forced, parents=list(range(-1, len(item.forced) - 1)))

    def count(self, item: ScheduledSequence, commit: Commit) -> int:
        num_accepted = len(commit.path) if item.forced else 0
        self.num_accepted += num_accepted
        return num_accepted
