"""Drafts from a suffix tree over earlier text (SuffixDecoding, Oliaro et al. 2024).

The proposer looks the end of a sequence up in its own text and in earlier outputs, and drafts the
most frequent continuations of the longest matches. Only requests of one scope share outputs: the
speed of an output hints at the outputs of others.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from weakref import WeakKeyDictionary, finalize

from headrace._native import SuffixTree, suffix_draft
from headrace.batch import NO_DRAFT, Commit, DraftTree
from headrace.logit_ops import StepResult
from headrace.proposer import ProposerTraits, SequenceView

_MAX_CORPUS_TOKENS = 1 << 17
"""Tokens of earlier outputs, of all scopes; each takes 52 to 56 bytes."""
_MAX_OWN_TOKENS = 1 << 17
"""Latest tokens of a sequence when its text is first read."""
_CONTEXT = 32
"""Tokens before an output that count when it is searched (`SuffixTree::kMaxMatch`)."""
_ACCEPTANCE = (
    *(0.15, 0.15, 0.2, 0.3, 0.35, 0.35, 0.4, 0.4, 0.4, 0.5),  # the text went on in several ways
    *(0.25, 0.45, 0.6, 0.7, 0.85, 0.85, 0.9, 0.9, 0.95, 0.95),
)
"""Rates for matches of 1, 2, 4, 8 and 16 tokens, in other outputs and in the own text, as measured
with two models (`benchmarks/acceptance.py`).
"""
_LENGTHS = 5
_SURE = 0.8
"""Frequency of the first token above which a draft is of the upper ten classes."""
_MIN_MATCH = 1
_MAX_WIDTH = 3
"""Children of a node."""
_MIN_VALUE = 0.1
"""Least product of frequencies on the way to a node."""


class SuffixProposer:
    """Drafts repetitions of a sequence's own text and of at most `max_corpus_tokens` of outputs."""

    def __init__(self, max_nodes: int, max_corpus_tokens: int = _MAX_CORPUS_TOKENS) -> None:
        self.traits = ProposerTraits(
            max_nodes,
            in_engine_thread=True,
            time_limit=None,
            acceptance=_ACCEPTANCE,
            observes=False,
        )
        self._corpus = _Corpus(max_corpus_tokens)
        self._transcripts: WeakKeyDictionary[SequenceView, _Transcript] = WeakKeyDictionary()
        self._ended = deque[_Transcript]()

    def propose(self, seqs: list[SequenceView], budgets: list[int]) -> list[DraftTree]:
        # Tokens are learned only here: many at once take far less time than a few after each step.
        while self._ended:
            self._corpus.learn(self._ended.popleft())
        transcripts = [self._transcript(seq) for seq in seqs]
        for transcript in transcripts:
            self._corpus.learn(transcript)
        return [
            self._draft(transcript, nodes)
            for transcript, nodes in zip(transcripts, budgets, strict=True)
        ]

    def observe(self, seqs: list[SequenceView], commits: list[Commit], result: StepResult) -> None:
        pass  # `propose` reads the new tokens of all sequences

    def _transcript(self, seq: SequenceView) -> "_Transcript":
        transcript = self._transcripts.get(seq)
        if transcript is None:
            transcript = self._transcripts[seq] = _Transcript(seq)
            finalize(seq, _end, transcript, self._ended).atexit = False
        return transcript

    def _draft(self, transcript: "_Transcript", budget: int) -> DraftTree:
        own = transcript.read()
        tokens, parents, probabilities, match, is_own = suffix_draft(
            own,
            0,
            self._corpus.tree(transcript.scope),
            transcript.output.text if transcript.output else -1,
            max_nodes=budget,
            max_width=_MAX_WIDTH,
            min_length=_MIN_MATCH,
            min_value=_MIN_VALUE,
        )
        if not tokens:
            return NO_DRAFT
        confidence = _confidence(match, probabilities[0], is_own=is_own)
        return DraftTree(tokens=tokens, parents=parents, confidence=confidence)


def _end(transcript: "_Transcript", ended: deque["_Transcript"]) -> None:
    transcript.own = None
    ended.append(transcript)


def _confidence(match: int, probability: float, *, is_own: bool) -> int:
    """Class of a draft: an index of `_ACCEPTANCE`."""
    length = min(match.bit_length(), _LENGTHS) - 1  # 0, 1, ... from 1, 2, 4, 8, 16 tokens on
    return 2 * _LENGTHS * (probability > _SURE) + 2 * length + is_own


class _Transcript:
    """The tokens of a sequence, which it outlives, so that its last tokens are learned."""

    def __init__(self, seq: SequenceView) -> None:
        self.scope = seq.scope
        self.known = seq.known
        self.learned = seq.prompt_len
        """Tokens that are in the corpus or in the prompt."""
        self.output: _Output | None = None
        self.own: SuffixTree | None = SuffixTree()
        """The tree of this text alone; None: the sequence has ended."""
        self._num_read = max(0, len(self.known) - _MAX_OWN_TOKENS)
        self.own.begin([])

    def read(self) -> SuffixTree:
        """The tree of the text, with its new tokens."""
        assert self.own is not None
        self.own.append(0, self.known[self._num_read :])
        self._num_read = len(self.known)
        return self.own


@dataclass(slots=True, eq=False)
class _Output:
    """A text in the tree of a scope."""

    scope: Hashable
    text: int
    """Its number in the tree; -1: it has left."""
    num_tokens: int
    """Tokens with the context."""


class _Corpus:
    """Outputs by scope, of at most `max_tokens` together. The oldest leave."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._trees: dict[Hashable, SuffixTree] = {}
        self._outputs = deque[_Output]()  # the oldest first

    def tree(self, scope: Hashable) -> SuffixTree | None:
        return self._trees.get(scope)

    def learn(self, transcript: _Transcript) -> None:
        tokens = transcript.known[transcript.learned :]
        if not tokens:
            return
        output = transcript.output
        if output is None:
            output = transcript.output = self._begin(transcript)
        if output.text < 0:
            return
        self._trees[output.scope].append(output.text, tokens)
        transcript.learned += len(tokens)
        output.num_tokens += len(tokens)
        self._num_tokens += len(tokens)
        while self._num_tokens > self._max_tokens:
            self._forget(self._outputs.popleft())

    def _begin(self, transcript: _Transcript) -> _Output:
        tree = self._trees.setdefault(transcript.scope, SuffixTree())
        start = transcript.learned
        context = transcript.known[max(0, start - _CONTEXT) : start]
        output = _Output(transcript.scope, tree.begin(context), len(context))
        self._outputs.append(output)
        self._num_tokens += len(context)
        return output

    def _forget(self, output: _Output) -> None:
        tree = self._trees[output.scope]
        tree.remove(output.text)
        output.text = -1
        self._num_tokens -= output.num_tokens
        if not tree.num_places:
            del self._trees[output.scope]
