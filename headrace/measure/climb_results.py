"""Results of a climb, and the settings that they advise."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.measure.climb_run import Measured
from headrace.measure.climb_rungs import Rung, WeightFile
from headrace.planner.hardware import Machine
from headrace.planner.money import per_million
from headrace.record import frozen

MAX_NLL_RISE = 0.02
"""Rise of NLL, in nats, above which a rung is not advised."""
_NOISE = 0.03
"""Share by which the speeds of equal rungs may differ."""
_FLAGS = ("kv_dtype", "activations", "proposer", "attention_top_blocks")
"""Options of rungs that `headrace serve` has as flags."""


@frozen(kw_only=True)
class Step:
    """A measured rung."""

    rung: Rung
    weights: WeightFile
    measured: Measured
    share: float
    """Share of the work's output tokens that the rung computed."""
    seconds: float
    """Seconds of the whole work, scaled by tokens if the rung did a part of it."""
    tokens_per_second: float
    """Output tokens of all requests, over the whole time."""
    first_token: float
    """Median seconds to the first token of a request that is alone."""
    first_token_of_all: float
    """Median seconds to the first token if all requests come at once."""
    same_as: str
    """Rung whose tokens must be equal; empty: the first of its kernels and formats."""
    difference: str
    """First token that differs from `same_as`, in words; empty if all are equal."""
    quality: Mapping[str, float]
    """Fields of `Quality` of the rung's number formats; empty without a measurement."""
    nll_rise: float | None
    """Nats above float32; None without a measurement."""

    def facts(self) -> dict[str, Any]:
        """The rung as JSON, in seconds, bytes and nats."""
        rung, measured = self.rung, self.measured
        return {
            "rung": rung.name,
            "base": rung.base,
            "text": rung.text,
            "mode": rung.mode,
            "weights": self.weights.format,
            "options": dict(rung.options),
            "has_slots": rung.has_slots,
            "share": self.share,
            "seconds": self.seconds,
            "samples": measured.samples,
            "tokens_per_second": self.tokens_per_second,
            "first_token": self.first_token,
            "first_token_of_all": self.first_token_of_all,
            "peak_memory": measured.peak_memory,
            "weight_bytes": measured.weight_bytes,
            "drafted": measured.drafted,
            "accepted": measured.accepted,
            "same_as": self.same_as,
            "difference": self.difference,
            "nll_rise": self.nll_rise,
            "quality": dict(self.quality),
        }


@frozen(kw_only=True)
class Advice:
    """Settings for this machine."""

    rung: str
    command: str
    sentence: str


@frozen(kw_only=True)
class Climb:
    model: str
    name: str
    format: str
    quick: bool
    machine: Machine
    requests: int
    prompt_tokens: int
    output_tokens: int
    slots: int
    steps: tuple[Step, ...]
    left_out: Mapping[str, str]
    """Reasons, by rung."""
    limit: float
    """Output tokens/s that memory and arithmetic of the machine allow for everything, without
    drafts.
    """
    advice: Advice

    @property
    def differences(self) -> list[str]:
        return [
            f"{step.rung.name} against {step.same_as}: {step.difference}"
            for step in self.steps
            if step.difference
        ]

    def factor(self, step: Step, base: str) -> float | None:
        """Speed in relation to a rung; None if it was left out."""
        speeds = {one.rung.name: one.tokens_per_second for one in self.steps}
        return step.tokens_per_second / speeds[base] if base in speeds else None

    def cost(self, step: Step, price: float) -> float:
        """Dollars for a million output tokens, at `price` dollars an hour."""
        return per_million(price, 1.0, step.tokens_per_second)

    def facts(self, price: float | None = None) -> dict[str, Any]:
        """The climb as JSON, in seconds, bytes, nats and dollars."""
        steps = []
        for step in self.steps:
            facts = step.facts()
            facts["of_first"] = self.factor(step, self.steps[0].rung.name)
            facts["of_base"] = self.factor(step, step.rung.base)
            if price is not None:
                facts["dollars_per_million"] = self.cost(step, price)
            steps.append(facts)
        work = ("requests", "prompt_tokens", "output_tokens", "slots")
        return {
            "model": self.model,
            "name": self.name,
            "format": self.format,
            "quick": self.quick,
            "machine": vars(self.machine) | {"rates": dict(self.machine.rates)},
            "work": {name: getattr(self, name) for name in work},
            "limit": self.limit,
            "rungs": steps,
            "left_out": dict(self.left_out),
            "advice": vars(self.advice),
        }


def advise(model: str, path: Path, steps: Sequence[Step], limit: float, threads: int = 0) -> Advice:
    """Choose the fastest rung that can be served and whose NLL is close to float32.

    Of rungs that are as fast, it chooses one with the fewest options. If the NLL of all rises more,
    or was not measured, it chooses among all.
    """
    served = [step for step in steps if step.rung.is_served and not step.difference] or steps
    close = [step for step in served if _is_close(step)] or served
    least = (1 - _NOISE) * max(step.tokens_per_second for step in close)
    best = min(
        (step for step in close if step.tokens_per_second >= least),
        key=lambda step: (len(_options(step)), -step.tokens_per_second),
    )
    fastest = max(served, key=lambda step: step.tokens_per_second)

    command = _command(model, path, best, threads)
    factor = best.tokens_per_second / steps[0].tokens_per_second
    sentence = (
        f"Run `{command}`: {best.tokens_per_second:,.0f} tokens/s on this machine, {factor:,.0f} "
        f"times the rung {steps[0].rung.name} and {best.tokens_per_second / limit:.0%} of the "
        f"machine's limit, with {_loss(best)}"
    )
    if fastest not in close:
        sentence += (
            f"; {fastest.rung.name} is faster, {fastest.tokens_per_second:,.0f} tokens/s, but has "
            f"{_loss(fastest)}"
        )
    return Advice(rung=best.rung.name, command=command, sentence=f"{sentence}.")


def _is_close(step: Step) -> bool:
    return step.nll_rise is not None and step.nll_rise <= MAX_NLL_RISE


def _loss(step: Step) -> str:
    if step.nll_rise is None:
        return "a loss of quality that was not measured"
    kl = step.quality.get("kl")
    divergence = "" if kl is None else f" (KL {kl:.4f})"
    return f"an NLL {step.nll_rise:+.4f} nats from float32{divergence}"


def _options(step: Step) -> dict[str, Any]:
    """Options of a rung that differ from their defaults."""
    options = {name: step.rung.options.get(name, getattr(EngineConfig, name)) for name in _FLAGS}
    return {
        name: chosen for name, chosen in options.items() if chosen != getattr(EngineConfig, name)
    }


def _command(model: str, path: Path, step: Step, threads: int) -> str:
    """The command that serves a rung, after the command that makes its file."""
    file, words = step.weights, ["headrace", "serve"]
    before = ""
    name = model
    if file.convert:
        name = f"{path.name.removesuffix('.gguf')}-{file.format.replace('_', '-')}"
        name = name.lower() + ("" if file.is_folder else ".gguf")
        before = shlex.join(["headrace", "convert", model, name, *file.convert]) + " && "
    words.append(name)
    for option, chosen in _options(step).items():
        words += [f"--{option.replace('_', '-')}", str(chosen)]
    if threads:
        words += ["--threads", str(threads)]
    return before + shlex.join(words)
