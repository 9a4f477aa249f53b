"""Rotary options, which change the rule of the model's files. Their names are llama.cpp's."""

from dataclasses import replace
from typing import Literal

from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.model.rope import inverse_frequencies, stretched_context, yarn_temperature
from headrace.model.spec import ModelSpec, RopeSpec

RopeRule = Literal["none", "linear", "dynamic", "yarn"]


def with_rope_options(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """Apply `rope_scaling`, `rope_scale`, `rope_theta` and `yarn_orig_ctx` to a model.

    Layers with a sliding window and a base of their own keep it, because they never see distant
    tokens. Raises RequestError if the model cannot have the options.
    """
    given = [
        name
        for name in ("rope_scaling", "rope_scale", "rope_theta", "yarn_orig_ctx")
        if getattr(config, name)
    ]
    if not given:
        return spec
    rope = spec.rope
    if rope is None:
        raise RequestError(f"{given[0]} is for rotary models, which this one is not; leave it out")
    if spec.mla:
        raise RequestError(
            f"{given[0]}: attention of {spec.architecture} has the rotary rule in the scale of its "
            "scores; change rope_scaling in the model's config.json instead"
        )

    rule = config.rope_scaling or _own_rule(rope, config.rope_scale)
    if config.yarn_orig_ctx and rule != "yarn":
        raise RequestError("yarn_orig_ctx is for YaRN; set rope_scaling to yarn, or leave it out")
    theta = config.rope_theta or rope.theta
    if rule is None:
        return replace(spec, rope=replace(rope, theta=theta))
    if rope.scaling == "longrope":
        raise RequestError(
            "rope_scaling: the model has longrope, with a factor for each pair; leave "
            f"{' and '.join(given)} out"
        )
    has_rule = rope.scaling == rule
    factor = config.rope_scale or (rope.factor if has_rule else 0.0)
    if rule != "none" and not factor:
        raise RequestError(
            f"rope_scaling {rule!r} needs rope_scale, the factor of the context; set for example "
            "rope_scale to 4"
        )

    trained = config.yarn_orig_ctx or _trained_context(spec, rope)
    if has_rule:
        changed = replace(rope, theta=theta, factor=factor)
    else:
        changed = RopeSpec(
            dim=rope.dim,
            theta=theta,
            scaling=rule,
            factor=factor or 1.0,
            factors=_divisors(spec, rope),
        )
    if rule == "yarn":
        changed = replace(changed, original_context=trained)
        if has_rule and rope.attention_factor is not None:
            grown = yarn_temperature(factor) / yarn_temperature(rope.factor)
            changed = replace(changed, attention_factor=rope.attention_factor * grown)
    return replace(spec, rope=changed, max_context=stretched_context(changed, trained))


def _own_rule(rope: RopeSpec, scale: float) -> RopeRule | None:
    """The rule to change without `rope_scaling`; None if there is none to change."""
    if rope.scaling in ("linear", "dynamic", "yarn"):
        return rope.scaling
    return "linear" if scale else None


def _trained_context(spec: ModelSpec, rope: RopeSpec) -> int:
    """The context before the model's own rule stretches it."""
    match rope.scaling:
        case "yarn" | "dynamic":
            return rope.original_context or spec.max_context
        case "linear":
            return round(spec.max_context / rope.factor)
    return spec.max_context


def _divisors(spec: ModelSpec, rope: RopeSpec) -> tuple[float, ...]:
    """The factors of a GGUF file, which has llama3's rule in this form too."""
    if rope.scaling != "llama3":
        return rope.factors
    plain, scaled = (
        inverse_frequencies(one, spec.max_context, spec.max_context)[0]
        for one in (RopeSpec(rope.dim, rope.theta), rope)
    )
    return tuple((plain / scaled).tolist())
