"""Proposers by name."""

from collections.abc import Callable, Sequence

from headrace.backend import Executable
from headrace.config import EngineConfig, KvConfig
from headrace.errors import RequestError
from headrace.kv.manager import KvManager
from headrace.proposer import Proposer
from headrace.record import frozen
from headrace.speculation.proposers.draft_model import DraftModelProposer
from headrace.speculation.proposers.jacobi import JacobiProposer
from headrace.speculation.proposers.lookahead import LookaheadProposer
from headrace.speculation.proposers.medusa import MedusaProposer
from headrace.speculation.proposers.ngram import NgramProposer
from headrace.speculation.proposers.online import OnlineProposer
from headrace.speculation.proposers.self_draft import SelfDraftProposer

__all__ = [
    "METHODS",
    "NEEDS",
    "PROPOSERS",
    "DraftModel",
    "DraftModels",
    "asked_for",
    "check_speculation",
    "make_proposers",
]


@frozen
class DraftModel:
    """A compiled draft model."""

    executable: Executable
    kv: KvManager
    """Its own."""
    longest: int
    """Tokens of the longest sequence that it was trained for."""


@frozen
class DraftModels:
    """What proposers are made from; each takes what it needs."""

    draft: DraftModel | None = None
    short: Executable | None = None
    """The first layers of the model and its head, over its weights and KV."""
    block_size: int = KvConfig.block_size
    """Of that KV."""
    heads: Sequence[Executable] = ()
    """Medusa heads, the nearest first."""

    @property
    def executables(self) -> list[Executable]:
        """All that draft."""
        return [
            *([self.draft.executable] if self.draft else []),
            *([self.short] if self.short else []),
            *self.heads,
        ]


NO_DRAFT_MODELS = DraftModels()


def _draft_model(config: EngineConfig, draft_models: DraftModels) -> Proposer:
    if draft_models.draft is None:
        raise RequestError(
            "proposer 'draft_model' needs a smaller model with the same vocabulary: set "
            "draft_model to one"
        )
    draft, wants = draft_models.draft, config.acceptance_method == "rejection"
    shape = (config.draft_depth, config.draft_width)
    return DraftModelProposer(
        draft.executable, draft.kv, draft.longest, *shape, probabilities=wants
    )


def _self_draft(config: EngineConfig, draft_models: DraftModels) -> Proposer:
    if draft_models.short is None:
        raise RequestError(
            "proposer 'self_draft' needs draft_layers: `headrace calibrate` suggests how many"
        )
    wants = config.acceptance_method == "rejection"
    return SelfDraftProposer(
        draft_models.short,
        draft_models.block_size,
        config.draft_depth,
        config.draft_width,
        probabilities=wants,
    )


def _medusa(config: EngineConfig, draft_models: DraftModels) -> Proposer:
    if not draft_models.heads:
        raise RequestError(
            "proposer 'medusa' needs heads that were trained for the model: set "
            "medusa_heads to their safetensors file"
        )
    return MedusaProposer(draft_models.heads, config.draft_depth, config.draft_width)


METHODS: dict[str, Callable[[EngineConfig, DraftModels], Proposer]] = {
    "ngram": lambda config, draft_models: NgramProposer(config.max_draft_tokens),
    "online": lambda config, draft_models: OnlineProposer(config.max_draft_tokens),
    "jacobi": lambda config, draft_models: JacobiProposer(config.max_draft_tokens),
    "lookahead": lambda config, draft_models: LookaheadProposer(config.max_draft_tokens),
    "draft_model": _draft_model,
    "self_draft": _self_draft,
    "medusa": _medusa,
}
"""Each proposer by its name."""
PROPOSERS = ("off", "auto", *METHODS)
"""What `EngineConfig.proposer` may be."""
NEEDS = {"draft_model": "draft_model", "self_draft": "draft_layers", "medusa": "medusa_heads"}
"""Methods with an option that they cannot do without, and that is for them alone."""
_AT_HAND = ("ngram", "online")
"""Those that `auto` always has: they cost microseconds, and nothing where they have nothing to say.
"""
_DRAWN = ("draft_model", "self_draft")
"""Those whose drafts are draws from a distribution."""


def asked_for(config: EngineConfig) -> tuple[str, ...]:
    """The methods that a configuration asks for. Raises RequestError for a name that is not in
    PROPOSERS.
    """
    name = config.proposer
    if name not in PROPOSERS:
        raise RequestError(f"unknown proposer {name!r}; there are: {', '.join(PROPOSERS)}")
    if name == "auto":
        return (*_AT_HAND, *(method for method, option in NEEDS.items() if getattr(config, option)))
    return () if name == "off" else (name,)


def make_proposers(
    config: EngineConfig, draft_models: DraftModels = NO_DRAFT_MODELS
) -> dict[str, Proposer]:
    """New proposers, by name: those that the configuration asks for.

    Raises RequestError for a name that is not in PROPOSERS, and where what a proposer is made from
    is missing.
    """
    return {name: METHODS[name](config, draft_models) for name in asked_for(config)}


def check_speculation(config: EngineConfig) -> None:
    """Refuse options of speculative decoding that do not go together: RequestError."""
    proposer, acceptance = config.proposer, config.acceptance_method
    for method, option in NEEDS.items():
        if getattr(config, option) and method not in asked_for(config):
            raise RequestError(
                f"{option} is for proposer {method!r} or 'auto', and the proposer is "
                f"{proposer!r}: set the one, or leave out the other"
            )
    if acceptance != "exact" and proposer == "off":
        raise RequestError(
            f"acceptance_method {acceptance!r} is about drafts, and the proposer is "
            "'off': set proposer, or leave acceptance_method out"
        )
    if acceptance == "rejection" and (
        config.draft_width > 1 or not set(_DRAWN).intersection(asked_for(config))
    ):
        raise RequestError(
            "acceptance_method 'rejection' is for chains of drafts drawn by a model "
            "(proposer draft_model or self_draft, or auto "
            "with one of them, draft_width 1); 'exact' takes any drafts"
        )
