"""Ways of guessing by name, and the guard that keeps a bad one from doing harm."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.backend import Executable
from headrace.batch import NO_GUESS, BranchView, Commit, Guess, Proposer, StepRows
from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.kv.blocks import BlockPool
from headrace.propose.draft_model import DraftModel
from headrace.propose.medusa import Medusa
from headrace.propose.ngram import Ngram
from headrace.propose.off import Off
from headrace.propose.self_draft import SelfDraft


@dataclass(frozen=True)
class Draft:
    """A compiled draft model."""

    executable: Executable
    pool: BlockPool
    """Of its own KV."""
    longest: int
    """Tokens of the longest sequence that it was trained for."""


@dataclass(frozen=True)
class Materials:
    """What ways of guessing are made from; each takes what it needs."""

    draft: Draft | None = None
    short: Executable | None = None
    """The first layers of the model and its head, over its weights and KV."""
    block_size: int = 32
    """Of that KV."""
    heads: Sequence[Executable] = ()
    """Medusa heads, the nearest first."""


Make = Callable[[EngineConfig, Materials], Proposer]


def _draft_model(config: EngineConfig, materials: Materials) -> Proposer:
    if materials.draft is None:
        raise RequestError("proposer 'draft_model' needs a smaller model with the same vocabulary: set draft_model to one")
    draft, wants = materials.draft, config.acceptance == "rejection"
    shape = (config.draft_depth, config.draft_width)
    return DraftModel(draft.executable, draft.pool, draft.longest, *shape, probabilities=wants)


def _self_draft(config: EngineConfig, materials: Materials) -> Proposer:
    if materials.short is None:
        raise RequestError("proposer 'self_draft' needs draft_layers: `headrace calibrate` suggests how many")
    wants = config.acceptance == "rejection"
    return SelfDraft(materials.short, materials.block_size, config.draft_depth, config.draft_width, probabilities=wants)


def _medusa(config: EngineConfig, materials: Materials) -> Proposer:
    if not materials.heads:
        raise RequestError("proposer 'medusa' needs heads that were trained for the model: set medusa_heads to their safetensors file")
    return Medusa(materials.heads, config.draft_depth, config.draft_width)


PROPOSERS: dict[str, Make] = {
    "off": lambda config, materials: Off(),
    "ngram": lambda config, materials: Ngram(),
    "draft_model": _draft_model,
    "self_draft": _self_draft,
    "medusa": _medusa,
}

_NEEDS = {"draft_model": "draft_model", "self_draft": "draft_layers", "medusa": "medusa_heads"}
"""The option that a proposer cannot do without, and that is for it alone."""
_DRAWN = ("draft_model", "self_draft")
"""Those whose guesses are draws from a distribution."""


def make_proposer(name: str, config: EngineConfig | None = None, materials: Materials | None = None) -> Proposer:
    """A new proposer. Raises RequestError for a name that is not in PROPOSERS, and where what it is made from is missing."""
    if name not in PROPOSERS:
        raise RequestError(f"unknown proposer {name!r}; there are: {', '.join(PROPOSERS)}")
    return PROPOSERS[name](config or EngineConfig(), materials or Materials())


def check_guessing(config: EngineConfig) -> None:
    """Refuse options about guesses that do not go together: RequestError."""
    proposer, acceptance = config.proposer, config.acceptance
    for needing, option in _NEEDS.items():
        if getattr(config, option) and proposer != needing:
            raise RequestError(
                f"{option} is for proposer {needing!r}, and the proposer is {proposer!r}: set the one, or leave out the other"
            )
    if acceptance != "descend" and proposer == "off":
        raise RequestError(f"acceptance {acceptance!r} is about guesses, and the proposer is 'off': set proposer, or leave acceptance out")
    if acceptance == "rejection" and (proposer not in _DRAWN or config.draft_width > 1):
        raise RequestError(
            f"acceptance 'rejection' is for chains of guesses drawn by a model (proposer {' or '.join(_DRAWN)}, draft_width 1); "
            "'descend' takes any guesses"
        )


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

    def close(self) -> None:
        """Let go of the proposer, and so of the models that it guesses with."""
        self._proposer = Off()

    def _checked(self, guess: Guess, room: int) -> Guess:
        try:
            tokens, parents = [operator.index(t) for t in guess.tokens], [operator.index(p) for p in guess.parents]
            sound = (
                len(tokens) == len(parents) <= room
                and all(0 <= token < self._vocab_size for token in tokens)
                and all(-1 <= parent < node for node, parent in enumerate(parents))
            )
            probabilities = getattr(guess, "probabilities", None)
            sound = sound and (probabilities is None or probabilities.shape == (len(tokens), self._vocab_size))
        except Exception:
            sound = False
        if not sound:
            self.failures += 1
        return Guess(tokens, parents, probabilities=probabilities) if sound else NO_GUESS
