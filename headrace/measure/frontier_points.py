"""The measured forms of a model, and the advice that follows from them."""

from collections.abc import Mapping
from typing import Any

from headrace.convert.quality import Quality
from headrace.measure.draft_meter import MAX_DEPTH
from headrace.measure.frontier import pareto_frontier
from headrace.planner.draft_gain import Costs, Gain, best_gain, exit_round
from headrace.record import frozen

MAX_KL = 0.02
"""KL divergence, in nats, up to which a lossy mode is advised."""
MIN_GAIN = 1.05
"""Speed over the full model from which a mode pays."""


@frozen(kw_only=True)
class EarlyRows:
    """What an early exit does for the tokens that leave."""

    share: float
    """Tokens that leave."""
    step_bytes: int
    """Bytes that a step up to the exit reads."""


@frozen(kw_only=True)
class FormScore:
    """What does not depend on the speed of the machine."""

    weight_bytes: int
    step_bytes: int
    """Bytes that a decode step of one sequence reads at the depth of the frontier."""
    quality: Quality
    acceptance: float | None
    """Share of the full model's greedy tokens that the form predicts; None if it does not draft."""
    early: EarlyRows | None
    """Of an early exit."""


@frozen(kw_only=True)
class FormSpeed:
    """Times of steps at the depth of the frontier, which took turns with the full model's."""

    seconds: float
    """Of the form's decode step."""
    full_seconds: float
    costs: Costs | None
    """Of the full model's steps with drafts and the form's; or of an early exit's steps, and of
    those that end at the exit. None for other forms that do not draft.
    """


@frozen(kw_only=True)
class Point:
    """A form of the model; a part may not be measured yet."""

    name: str
    kind: str
    score: FormScore | None
    speed: FormSpeed | None
    full_seconds: float
    """Of the full model's decode step, next to all forms."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self._score.weight_bytes

    @property
    def step_bytes(self) -> float:
        """Bytes that are read for a token."""
        score = self._score
        if not score.early:
            return score.step_bytes
        depth = None
        if self.speed and self.speed.costs:
            depth = exit_round(score.early.share, self.speed.costs).depth
        costs = Costs([score.step_bytes] * (MAX_DEPTH + 1), score.early.step_bytes)
        return exit_round(score.early.share, costs, depth).cost

    @property
    def decode(self) -> float:
        """Tokens/s of one sequence: the full model's, times the gain.

        A shared machine is not equally fast for all forms, but it is for steps that take turns.
        """
        return self.gain / self.full_seconds

    @property
    def gain(self) -> float:
        """Speed over the full model."""
        return self._speed.full_seconds / self._seconds

    @property
    def loss(self) -> float:
        """KL divergence from the full model, in nats."""
        return self._score.quality.kl or 0.0

    @property
    def draft(self) -> Gain | None:
        """Speed as an exact draft at the best depth; None for forms that do not draft."""
        score, speed = self.score, self.speed
        if not (score and speed and speed.costs) or score.acceptance is None:
            return None
        return best_gain(score.acceptance, speed.costs)

    @property
    def is_complete(self) -> bool:
        return self.score is not None and self.speed is not None

    @property
    def _seconds(self) -> float:
        speed = self._speed
        if self.score and self.score.early and speed.costs:
            return exit_round(self.score.early.share, speed.costs).cost
        return speed.seconds

    @property
    def _score(self) -> FormScore:
        assert self.score, f"the quality of {self.name} is not measured"
        return self.score

    @property
    def _speed(self) -> FormSpeed:
        assert self.speed, f"the speed of {self.name} is not measured"
        return self.speed

    def facts(self) -> dict[str, Any]:
        """The form as JSON; None for what is not measured."""
        score, speed, gain = self.score, self.speed, self.draft
        return {
            "name": self.name,
            "kind": self.kind,
            "weight_bytes": score and score.weight_bytes,
            "step_bytes": score and round(self.step_bytes),
            "decode": speed and self.decode,
            "gain": speed and self.gain,
            "quality": score and vars(score.quality),
            "draft": gain and {"acceptance": score and score.acceptance, **gain._asdict()},
            "leaves": score and score.early and score.early.share,
        }


@frozen(kw_only=True)
class Frontier:
    model: str
    depth: int
    """Tokens of context at which bytes and speeds are measured."""
    tokens: int
    points: tuple[Point, ...]
    """The full model first."""
    left_out: Mapping[str, str]
    """Reasons, by name of the form."""

    @property
    def complete(self) -> list[Point]:
        """Forms whose quality and speed are measured."""
        return [point for point in self.points if point.is_complete]

    @property
    def best(self) -> list[str]:
        """Names of the forms that no other beats in speed and loss."""
        return pareto_frontier(self.complete)

    @property
    def advice(self) -> str:
        """A sentence: the lossy form and the draft that pay, or that none does."""
        if left := len(self.points) - len(self.complete):
            return f"Quality or speed of {left} forms is not measured yet."
        forms = self.points[1:]
        close = [form for form in forms if form.loss <= MAX_KL and form.gain >= MIN_GAIN]
        lossy = max(close, key=lambda form: form.gain, default=None)
        exact = max(forms, key=_draft_speed, default=None)
        parts = []
        if lossy:
            parts.append(
                f"{lossy.name} decodes {lossy.gain:.2f} times as fast for a KL of {lossy.loss:.4f} "
                "nats"
            )
        if exact and exact.draft and exact.draft.speedup >= MIN_GAIN:
            parts.append(
                f"{exact.name} as an exact draft gives {exact.draft.speedup:.2f} times the "
                f"speed ({exact.draft.depth} tokens deep) and changes no token"
            )
        if not parts:
            return f"No form pays here: {self._nearest()}."
        return f"{'; '.join(parts)}."

    def _nearest(self) -> str:
        """The best draft and the fastest close form, which are too slow."""
        forms = self.points[1:]
        if not forms:
            return "none could be made"
        near, fastest = max(forms, key=_draft_speed), max(forms, key=lambda form: form.gain)
        text = f"{fastest.name}, the fastest, has a KL of {fastest.loss:.3f} nats"
        if near.draft and near.score:
            text += (
                f", and {near.name}, the best draft, gives {near.draft.speedup:.2f} times the "
                f"speed with {near.score.acceptance:.0%} of its tokens accepted"
            )
        return text

    def facts(self) -> dict[str, Any]:
        """The frontier as JSON, in bytes, tokens/s and nats."""
        return {
            "model": self.model,
            "depth": self.depth,
            "tokens": self.tokens,
            "rows": [point.facts() for point in self.points],
            "frontier": self.best,
            "left_out": dict(self.left_out),
            "advice": self.advice,
        }


def _draft_speed(form: Point) -> float:
    return form.draft.speedup if form.draft else 0.0
