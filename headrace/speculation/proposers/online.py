"""A table of the tokens that followed runs of tokens in earlier outputs.

Only requests of one scope share it: the speed of an output hints at the outputs of others.
"""

from collections import deque
from collections.abc import Hashable
from weakref import WeakKeyDictionary, finalize

from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView
from headrace.speculation.proposers.trees import merge

_SIZES = (8, 4, 2)
_ACCEPTANCE = (0.5, 0.75, 0.85)
"""Rates after runs of 2, 4 and 8 tokens; measured 0.49, 0.75, 0.88 (`benchmarks/acceptance.py`)."""
_MAX_FOLLOWERS = 2
"""Latest followers of each run."""


class OnlineProposer:
    """Drafts repetitions of earlier outputs, from at most `max_runs` recently used runs."""

    def __init__(self, max_nodes: int, max_runs: int = 1 << 16) -> None:
        self.traits = ProposerTraits(
            max_nodes, in_engine_thread=True, time_limit=None, acceptance=_ACCEPTANCE
        )
        self._max_runs = max_runs
        self._followers: dict[tuple[Hashable, ...], list[int]] = {}  # in the order of last use
        self._transcripts: WeakKeyDictionary[SequenceView, _Transcript] = WeakKeyDictionary()
        self._ended = deque[_Transcript]()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        # Tokens are learned only here: many at once take far less time than a few after each step.
        while self._ended:
            self._learn(self._ended.popleft())
        return [
            self._draft(self._transcript(seq), nodes)
            for seq, nodes in zip(seqs, budgets, strict=True)
        ]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        pass  # `propose` reads the new tokens of all sequences

    def _transcript(self, seq: SequenceView) -> "_Transcript":
        transcript = self._transcripts.get(seq)
        if transcript is None:
            transcript = self._transcripts[seq] = _Transcript(seq)
            finalize(seq, self._ended.append, transcript).atexit = False
        self._learn(transcript)
        return transcript

    def _draft(self, transcript: "_Transcript", budget: int) -> DraftTree:
        tail = transcript.known[-_SIZES[0] :]
        found = self._look_up(transcript.scope, tail)
        if found is None:
            return NO_DRAFT
        size, followers = found
        chains = [
            [token, *self._continuation(transcript.scope, [*tail, token], budget - 1)]
            for token in followers
        ]
        return merge(chains, budget, confidence=_SIZES[::-1].index(size))

    def _continuation(self, scope: Hashable, tokens: list[int], length: int) -> list[int]:
        chain: list[int] = []
        while len(chain) < length and (found := self._look_up(scope, tokens)):
            chain.append(found[1][0])
            tokens = [*tokens[-_SIZES[0] + 1 :], chain[-1]]
        return chain

    def _look_up(self, scope: Hashable, tokens: list[int]) -> tuple[int, list[int]] | None:
        for size in _SIZES:
            run = (scope, *tokens[-size:])
            if len(run) == 1 + size and (followers := self._followers.get(run)):
                self._followers[run] = self._followers.pop(run)
                return size, followers
        return None

    def _learn(self, transcript: "_Transcript") -> None:
        known, table = transcript.known, self._followers
        for position in range(transcript.learned, len(known)):
            token = known[position]
            for size in _SIZES:
                if size <= position:
                    run = (transcript.scope, *known[position - size : position])
                    followers = table.pop(run, None)
                    if followers is None:
                        followers = [token]
                    elif followers[0] != token:
                        others = [other for other in followers if other != token]
                        followers = [token, *others][:_MAX_FOLLOWERS]
                    table[run] = followers
        transcript.learned = len(known)
        while len(table) > self._max_runs:
            del table[next(iter(table))]


class _Transcript:
    """The tokens of a sequence, which it outlives, so that its last tokens are learned."""

    def __init__(self, seq: SequenceView) -> None:
        self.scope = seq.scope
        self.known = seq.known
        self.learned = seq.prompt_len
        """Tokens that are learned or in the prompt."""
