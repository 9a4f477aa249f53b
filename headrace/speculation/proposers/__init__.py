"""Proposers of draft tokens, by name. A start imports those that it uses."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.backend import Executable
from headrace.config import LOSSY_OPTIONS, EngineConfig, KvConfig
from headrace.errors import RequestError
from headrace.kv.manager import KvManager
from headrace.proposer import Proposer
from headrace.record import frozen

if TYPE_CHECKING:
    from headrace.speculation.proposers.draft_model import OtherVocabulary
    from headrace.speculation.proposers.eagle import DrafterPrograms

__all__ = [
    "METHODS",
    "PROPOSERS",
    "REQUIRED_OPTIONS",
    "DraftModel",
    "DraftModels",
    "check_replaced",
    "check_speculation",
    "enabled_methods",
    "make_proposers",
]


@frozen
class DraftModel:
    executable: Executable
    kv: KvManager
    max_length: int
    """Length in tokens."""
    vocabulary: "OtherVocabulary | None" = None
    """Its vocabulary, if it has not the target's tokens."""


@frozen
class DraftModels:
    """The compiled programs that draft."""

    draft: DraftModel | None = None
    drafter: "DrafterPrograms | None" = None
    """A drafter over rows of the target, in place of a draft model."""
    self_draft: Executable | None = None
    """The target's program, shortened, over the target's KV."""
    block_size: int = KvConfig.block_size
    heads: Sequence[Executable] = ()
    """Medusa heads by distance of the predicted token."""

    @property
    def executables(self) -> list[Executable]:
        draft = [self.draft.executable] if self.draft else []
        drafter = [self.drafter.from_target, self.drafter.from_itself] if self.drafter else []
        self_draft = [self.self_draft] if self.self_draft else []
        return [*draft, *(each.executable for each in drafter), *self_draft, *self.heads]


NO_DRAFT_MODELS = DraftModels()


def _draft_model(config: EngineConfig, draft_models: DraftModels) -> Proposer:
    if draft_models.drafter:
        from headrace.speculation.proposers.eagle import EagleProposer

        return EagleProposer(
            draft_models.drafter,
            config.draft_depth,
            config.draft_width,
            probabilities=config.acceptance_method == "rejection",
            prefix_cache=config.prefix_cache,
        )
    draft = draft_models.draft
    if draft is None:
        raise RequestError("proposer 'draft_model' needs a smaller model; set draft_model")
    from headrace.speculation.proposers.draft_model import DraftModelProposer

    return DraftModelProposer(
        draft.executable,
        draft.kv,
        draft.max_length,
        config.draft_depth,
        config.draft_width,
        probabilities=config.acceptance_method == "rejection",
        vocabulary=draft.vocabulary,
    )


def _self_draft(config: EngineConfig, draft_models: DraftModels) -> Proposer:
    if draft_models.self_draft is None:
        raise RequestError(missing_self_draft())
    from headrace.speculation.proposers.self_draft import SelfDraftProposer

    return SelfDraftProposer(
        draft_models.self_draft,
        draft_models.block_size,
        config.draft_depth,
        config.draft_width,
        probabilities=config.acceptance_method == "rejection",
    )


def missing_self_draft() -> str:
    """Message for `self_draft` without an option that shortens the model."""
    return (
        f"proposer 'self_draft' needs one of {', '.join(REQUIRED_OPTIONS['self_draft'])}; "
        "`headrace calibrate` suggests draft_layers"
    )


def _medusa(config: EngineConfig, draft_models: DraftModels) -> Proposer:
    if not draft_models.heads:
        raise RequestError(
            "proposer 'medusa' needs heads that were trained for the model; set medusa_heads to "
            "their safetensors file or folder"
        )
    from headrace.speculation.proposers.medusa import MedusaProposer

    return MedusaProposer(draft_models.heads, config.draft_depth, config.draft_width)


def _suffix(config: EngineConfig, draft_models: DraftModels) -> Proposer:
    from headrace.speculation.proposers.suffix import SuffixProposer

    return SuffixProposer(config.max_draft_tokens)


def _jacobi(config: EngineConfig, draft_models: DraftModels) -> Proposer:
    from headrace.speculation.proposers.jacobi import JacobiProposer

    return JacobiProposer(config.max_draft_tokens)


def _lookahead(config: EngineConfig, draft_models: DraftModels) -> Proposer:
    from headrace.speculation.proposers.lookahead import LookaheadProposer

    return LookaheadProposer(config.max_draft_tokens)


METHODS: dict[str, Callable[[EngineConfig, DraftModels], Proposer]] = {
    "suffix": _suffix,
    "jacobi": _jacobi,
    "lookahead": _lookahead,
    "draft_model": _draft_model,
    "self_draft": _self_draft,
    "medusa": _medusa,
}
PROPOSERS = ("off", "auto", *METHODS)
REQUIRED_OPTIONS: dict[str, tuple[str, ...]] = {
    "draft_model": ("draft_model",),
    "self_draft": (
        "draft_layers",
        "draft_weights",
        "draft_top_blocks",
        "draft_sparsity",
        "early_exit",
    ),
    "medusa": ("medusa_heads",),
}
"""The options that enable each method, at least one of them."""
_REPLACED = {"ngram": "suffix", "online": "suffix"}
"""Methods of earlier versions, and the methods that do better."""
_ALWAYS_ENABLED = ("suffix",)
_WITH_PROBABILITIES = ("draft_model", "self_draft")


def check_replaced(name: object) -> None:
    """Raise RequestError for a proposer of an earlier version."""
    if isinstance(name, str) and name in _REPLACED:
        raise RequestError(
            f"proposer {name!r} was replaced by {_REPLACED[name]!r}, which drafts from the text "
            f"and from earlier outputs; set proposer to {_REPLACED[name]}"
        )


def enabled_methods(config: EngineConfig) -> tuple[str, ...]:
    """Return the methods of a configuration. Raises RequestError for an unknown proposer."""
    name = config.proposer
    check_replaced(name)
    if name not in PROPOSERS:
        raise RequestError(f"unknown proposer {name!r}; choose from {', '.join(PROPOSERS)}")
    if name == "off":
        return ()
    if name != "auto":
        return (name,)
    configured = [
        method
        for method, options in REQUIRED_OPTIONS.items()
        if any(getattr(config, option) for option in options)
    ]
    return (*_ALWAYS_ENABLED, *configured)


def make_proposers(
    config: EngineConfig, draft_models: DraftModels = NO_DRAFT_MODELS
) -> dict[str, Proposer]:
    """Make the enabled proposers, by name. Raises RequestError if `draft_models` lacks a
    program.
    """
    return {name: METHODS[name](config, draft_models) for name in enabled_methods(config)}


def check_speculation(config: EngineConfig) -> None:
    """Raise RequestError for options that exclude each other."""
    proposer, acceptance = config.proposer, config.acceptance_method
    methods = enabled_methods(config)
    for method, options in REQUIRED_OPTIONS.items():
        given = [
            option for option in options if option not in LOSSY_OPTIONS and getattr(config, option)
        ]
        if given and method not in methods:
            raise RequestError(
                f"{given[0]} is for proposer {method!r} or 'auto', and proposer is {proposer!r}; "
                "change the proposer or leave the option out"
            )
    if config.learn_drafts and not config.draft_model:
        raise RequestError(
            "learn_drafts trains the drafter that draft_model names, and there is none; set "
            "draft_model to the folder of an EAGLE-3 drafter, or leave learn_drafts out"
        )
    if acceptance != "exact" and proposer == "off":
        raise RequestError(
            f"acceptance_method {acceptance!r} verifies drafts, and proposer is 'off'; set "
            "proposer, or leave acceptance_method out"
        )
    can_reject = config.draft_width == 1 and set(_WITH_PROBABILITIES).intersection(methods)
    if acceptance == "rejection" and not can_reject:
        raise RequestError(
            "acceptance_method 'rejection' needs chains that a model has sampled: proposer "
            "draft_model or self_draft (or auto with either) and draft_width 1; 'exact' verifies "
            "any drafts"
        )
