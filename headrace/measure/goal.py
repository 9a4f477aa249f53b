"""Goals of a model's service: bounds on speed and cost for a number of users.

A goal is text such as `ttft<1s tpot<30ms users=40 context=8k`.
"""

import re
from collections.abc import Mapping
from typing import Literal, get_args

from headrace.errors import RequestError
from headrace.record import frozen

Metric = Literal["ttft", "tpot", "throughput", "cost"]
METRICS: tuple[Metric, ...] = get_args(Metric)
UNITS: Mapping[Metric, str] = {
    "ttft": "s",
    "tpot": "s",
    "throughput": "tokens/s",
    "cost": "$ per million tokens",
}
_SIZES = ("users", "context", "prompt", "output")
_TERM = re.compile(r"([a-z]+)(?:(<=|>=|<|>|=)(\$?)(\d+(?:\.\d*)?|\.\d+)([a-z$/]*))?")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_TOKENS = {"": 1, "k": 1024}
_COUNTS = {"": 1, "k": 1000}
_RATES = {"": 1.0, "k": 1e3, "tok/s": 1.0, "tokens/s": 1.0}
_DOLLARS = {"": 1.0, "$": 1.0}
_FORMS = {
    "ttft": "ttft<1s",
    "tpot": "tpot<30ms",
    "throughput": "throughput>500",
    "cost": "cost<0.5",
    "users": "users=40",
    "context": "context=8k",
    "prompt": "prompt=2k",
    "output": "output=256",
}
_OUTPUT = 128
_PROMPT = 512
_MAX_SIZE = 1 << 24
_BUDGET = re.compile(r"\$?(\d+(?:\.\d+)?)\$?(?:/h)?")


@frozen(kw_only=True)
class Goal:
    """Bounds on means over all requests; None: no bound."""

    users: int
    """Requests at a time: each user sends the next one when the last is answered."""
    prompt: int
    """Tokens of a prompt."""
    output: int
    """Tokens of an output."""
    context: int
    """Tokens that each sequence has room for."""
    ttft: float | None
    """Max seconds to the first token."""
    tpot: float | None
    """Max seconds between two tokens."""
    throughput: float | None
    """Min output tokens/s of all users."""
    cost: float | None
    """Max dollars for a million output tokens."""
    best: Metric | None
    """What to make as good as the bounds allow; None: dollars per hour."""

    def bound(self, metric: Metric) -> float | None:
        value: float | None = getattr(self, metric)
        return value

    @property
    def text(self) -> str:
        """The goal in its grammar, with all sizes."""
        bounds = [
            f"{metric}{'>' if metric == 'throughput' else '<'}{bound:g}"
            + ("s" if metric in ("ttft", "tpot") else "")
            for metric in METRICS
            if (bound := self.bound(metric)) is not None
        ]
        sizes = [f"{name}={getattr(self, name)}" for name in _SIZES]
        return " ".join([*bounds, *([self.best] if self.best else []), *sizes])


def parse_goal(
    text: str, *, prompt: int | None = None, output: int | None = None, context: int | None = None
) -> Goal:
    """Parse a goal. Terms are separated by spaces or commas.

    `ttft` and `tpot` have upper bounds in `s` or `ms`, `cost` one in dollars for a million output
    tokens, and `throughput` a lower bound in output tokens/s. One of them without a bound is made
    as good as the others allow. `users`, `context`, `prompt` and `output` have sizes; `k` is 1,024
    tokens, or 1,000 users. The arguments hold for terms that the text leaves out.

    Raises RequestError that names the term.
    """
    found: dict[str, float] = {}
    best: Metric | None = None
    for term in text.lower().replace(",", " ").split():
        name, value = _parse_term(term)
        if name in found or name == best:
            raise RequestError(f"goal names '{name}' twice; keep one")
        if value is not None:
            found[name] = value
        elif best is not None:
            raise RequestError(
                f"goal has '{best}' and '{name}' without a bound; leave one, and bound the other, "
                f"such as {_FORMS[name]}"
            )
        else:
            best = next(metric for metric in METRICS if metric == name)
    if not found and best is None:
        raise RequestError(f"goal is empty; write terms such as {' '.join(_FORMS.values())}")

    output = int(found.get("output", output or 0)) or _OUTPUT
    context = int(found.get("context", context or 0))
    prompt = int(found.get("prompt", prompt or 0))
    if not prompt:
        prompt = max(1, context - output) if context else _PROMPT
    if context and context < prompt + output:
        raise RequestError(
            f"goal has context={context:,}, less than {prompt:,} tokens of prompt and {output:,} "
            "of output; raise context, or name a shorter prompt or output"
        )
    return Goal(
        users=int(found.get("users", 1)),
        prompt=prompt,
        output=output,
        context=context or prompt + output,
        ttft=found.get("ttft"),
        tpot=found.get("tpot"),
        throughput=found.get("throughput"),
        cost=found.get("cost"),
        best=best,
    )


def parse_dollars_per_hour(text: str) -> float:
    """Parse `2$/h`, `$2/h` or `2`. Raises RequestError."""
    match = _BUDGET.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise RequestError(
            f"budget {text[:40]!r} is not a price; write dollars per hour, such as 2$/h"
        )
    return float(match[1])


def _parse_term(term: str) -> tuple[str, float | None]:
    """The name of a term and its value, which is None without a bound."""
    match = _TERM.fullmatch(term)
    name = match[1] if match else re.split(r"[^a-z]", term, maxsplit=1)[0]
    if name not in _FORMS:
        raise RequestError(f"goal term '{term[:40]}' is unknown; known are: {', '.join(_FORMS)}")
    if not match:
        raise RequestError(f"goal term '{term[:40]}' is malformed; write it as {_FORMS[name]}")
    _, sign, dollar, number, unit = match.groups()
    if sign is None:
        if name in _SIZES:
            raise RequestError(f"goal term '{name}' has no size; write it as {_FORMS[name]}")
        return name, None

    signs = ("=",) if name in _SIZES else (">", ">=") if name == "throughput" else ("<", "<=")
    units = _units(name)
    if sign not in signs or unit not in units or (dollar and name != "cost"):
        raise RequestError(f"goal term '{term[:40]}' is malformed; write it as {_FORMS[name]}")
    value = float(number) * units[unit]
    if not value or (name in _SIZES and (value != int(value) or value > _MAX_SIZE)):
        whole = f"a whole number up to {_MAX_SIZE:,}" if name in _SIZES else "above zero"
        raise RequestError(f"goal term '{term[:40]}' must be {whole}")
    return name, value


def _units(name: str) -> Mapping[str, float]:
    match name:
        case "ttft" | "tpot":
            return _SECONDS
        case "throughput":
            return _RATES
        case "cost":
            return _DOLLARS
        case "users":
            return _COUNTS
    return _TOKENS
