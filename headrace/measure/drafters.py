"""Compares in the engine what can draft for a model: acceptance by depth, costs and speed."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count, islice
from typing import Any

from headrace.config import EngineConfig, KvConfig
from headrace.errors import HeadraceError
from headrace.loader.load import LoadedModel, load_model
from headrace.loader.options import engine_config
from headrace.measure.climb_work import cut, questions
from headrace.measure.progress import ProgressCallback
from headrace.outputs import DraftStats
from headrace.record import frozen
from headrace.request import RequestOptions
from headrace.sampling_params import SamplingParams

BATCHES = (1, 4, 16)
ROUNDS = 3
LEAST_SPEED = 0.97
"""Speed at each batch, as a share of plain decoding, below which no drafter is advised."""
_MAX_PROMPT = 1 << 16
_MAX_TOKENS = 96
"""Max tokens of a sequence. Longer texts would take minutes at batch 16."""


@frozen(kw_only=True)
class Drafter:
    """A way to draft: its name, and its options of `LLM`."""

    name: str
    options: Mapping[str, Any]


@frozen(kw_only=True)
class BatchSpeed:
    """Speed of a drafter as a share of plain decoding, with so many sequences at once."""

    batch: int
    predicted: float
    """With always the same depth, the best, from acceptance and costs."""
    speedups: tuple[float, ...]
    """Measured with adaptive speculation, in each round."""

    @property
    def speed(self) -> float:
        return statistics.median(self.speedups)


@frozen(kw_only=True)
class MeasuredDrafter:
    drafter: Drafter
    acceptance: tuple[float, ...]
    """Share of steps that accept at least 1, 2, ... draft tokens."""
    draft_seconds: float
    """Seconds of a draft token of a single sequence."""
    plain_seconds: float
    """Seconds of a plain step of a single sequence."""
    depth: int
    """The best depth for a single sequence by these figures."""
    speeds: tuple[BatchSpeed, ...]

    @property
    def cost(self) -> float:
        """A draft token in plain steps."""
        return self.draft_seconds / self.plain_seconds

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a step at the best depth."""
        return 1 + sum(self.acceptance[: self.depth])

    @property
    def pays(self) -> bool:
        """Whether it is faster for a single sequence in every round, and at no batch too slow."""
        slowest = min(each.speed for each in self.speeds)
        return min(self.speeds[0].speedups) > 1 and slowest >= LEAST_SPEED

    @property
    def options(self) -> dict[str, Any]:
        """Options of `LLM`, with the best depth."""
        name = "max_draft_tokens" if self.drafter.options["proposer"] == "suffix" else "draft_depth"
        depth = {} if name == "max_draft_tokens" else {name: self.depth}
        return {**self.drafter.options, **depth}

    def facts(self) -> dict[str, Any]:
        """The figures as JSON, in seconds."""
        return {
            "name": self.drafter.name,
            "options": self.options,
            "acceptance_by_depth": list(self.acceptance),
            "draft_seconds": self.draft_seconds,
            "plain_seconds": self.plain_seconds,
            "depth": self.depth,
            "tokens_per_step": self.tokens_per_step,
            "speeds": [
                {
                    "batch": each.batch,
                    "predicted": each.predicted,
                    "measured": each.speed,
                    "lowest": min(each.speedups),
                    "highest": max(each.speedups),
                }
                for each in self.speeds
            ],
        }


def compare_drafters(
    model: str,
    drafters: Sequence[Drafter],
    config: EngineConfig,
    on_progress: ProgressCallback,
    *,
    prompts: Sequence[str] = (),
    tokens: int = _MAX_TOKENS,
    max_depth: int = 8,
) -> tuple[MeasuredDrafter, ...]:
    """Measure each drafter against plain decoding, in turns, at the batches of `BATCHES`.

    The requests are `prompts`, then questions, programs and corrections; each has up to
    `tokens` greedy tokens. A round has a cache salt of its own, so no earlier round helps. Raises
    as `load_model`, and HeadraceError if a drafter fails.
    """
    asked = list(islice(chain(prompts, questions()), BATCHES[-1]))
    tokens = min(tokens, _MAX_TOKENS)
    common: dict[str, Any] = {
        "backend": config.backend,
        "threads": config.threads,
        "max_num_seqs": BATCHES[-1],
    }
    # Accepted tokens are counted by step. Speeds are those of the options that a user gets.
    by_step = {**common, "multi_step_ms": 0}
    with _bench(model, by_step, asked, tokens) as plain:
        forced = [
            _force(model, drafter, by_step, plain, on_progress, max_depth) for drafter in drafters
        ]
    with _bench(model, common, asked, tokens) as plain:
        return tuple(
            _race(model, drafter, common, plain, on_progress, each)
            for drafter, each in zip(drafters, forced, strict=True)
        )


@frozen(kw_only=True)
class _Forced:
    """Figures of a drafter whose drafts all run."""

    acceptance: tuple[float, ...]
    draft_seconds: float
    plain_seconds: float
    gains: tuple[tuple[int, float], ...]
    """The best depth and its expected speed, by batch."""


def _force(
    model: str,
    drafter: Drafter,
    common: Mapping[str, Any],
    plain: "_Bench",
    on_progress: ProgressCallback,
    max_depth: int,
) -> _Forced:
    depths = {"draft_depth": max_depth, "max_draft_tokens": max(16, max_depth)}
    forced, steps = [], []
    own = {**common, **drafter.options, **depths, "adaptive_speculation": False}
    with _bench(model, own, plain.asked, plain.tokens) as bench:
        for batch in (BATCHES[0], *BATCHES):  # the first run warms up
            on_progress(f"{drafter.name}: acceptance, {batch} at once", batch / BATCHES[-1])
            forced.append(bench.run(batch))
            steps.append(plain.run(batch).step_seconds)
    del forced[0], steps[0]
    acceptance = _acceptance(forced[-1].accepted, max_depth)
    gains = [
        _best_gain(acceptance, run, plain_step)
        for run, plain_step in zip(forced, steps, strict=True)
    ]
    return _Forced(
        acceptance=acceptance,
        draft_seconds=forced[0].draft_seconds,
        plain_seconds=steps[0],
        gains=tuple(gains),
    )


def _race(
    model: str,
    drafter: Drafter,
    common: Mapping[str, Any],
    plain: "_Bench",
    on_progress: ProgressCallback,
    forced: _Forced,
) -> MeasuredDrafter:
    speedups: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    depth = forced.gains[0][0]
    own = {**common, **drafter.options, "draft_depth": depth}
    with _bench(model, own, plain.asked, plain.tokens) as bench:
        for number in range(ROUNDS + 1):
            on_progress(
                f"{drafter.name}: speed, round {number + 1} of {ROUNDS + 1}", number / (ROUNDS + 1)
            )
            for batch in BATCHES:
                base, drafted = plain.run(batch), bench.run(batch)
                if number:
                    speedups[batch].append(drafted.tokens_per_second / base.tokens_per_second)
    return MeasuredDrafter(
        drafter=drafter,
        acceptance=forced.acceptance,
        draft_seconds=forced.draft_seconds,
        plain_seconds=forced.plain_seconds,
        depth=depth,
        speeds=tuple(
            BatchSpeed(batch=batch, predicted=gain[1], speedups=tuple(speedups[batch]))
            for batch, gain in zip(BATCHES, forced.gains, strict=True)
        ),
    )


@frozen(kw_only=True)
class _Run:
    """One run of some requests, from the step after the first token of the last."""

    seconds: float
    tokens: int
    steps: int
    accepted: tuple[int, ...]
    """Draft tokens that each step of a sequence accepted."""
    drafts: DraftStats
    """Of whole requests."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def draft_seconds(self) -> float:
        """Seconds of a draft token."""
        return self.drafts.seconds / max(1, self.drafts.proposed)

    @property
    def drafting_seconds(self) -> float:
        """Seconds of the proposer in a step."""
        sequences = len(self.accepted) / self.steps
        return self.drafts.seconds / max(1, self.drafts.steps) * sequences


def _acceptance(accepted: Sequence[int], max_depth: int) -> tuple[float, ...]:
    total = max(1, len(accepted))
    return tuple(sum(n >= d for n in accepted) / total for d in range(1, max_depth + 1))


def _best_gain(acceptance: Sequence[float], run: _Run, plain_step: float) -> tuple[int, float]:
    """The best depth, and its expected speed as a share of plain decoding.

    A step without the proposer takes longer with each draft token: so much as in the `run`, whose
    drafts have all depths.
    """
    deepest = run.drafts.proposed / max(1, run.drafts.steps)
    rows = max(0.0, run.step_seconds - run.drafting_seconds - plain_step)
    token_seconds = (rows + run.drafting_seconds) / max(1.0, deepest)

    def gain(depth: int) -> float:
        tokens = 1 + sum(acceptance[:depth])
        return tokens * plain_step / (plain_step + depth * token_seconds)

    best = max(range(1, len(acceptance) + 1), key=gain)
    return best, gain(best)


class _Bench:
    """An engine that runs the first requests of a list."""

    def __init__(self, loaded: LoadedModel, asked: Sequence[str], tokens: int) -> None:
        self.asked, self.tokens = asked, tokens
        self._engine = loaded.engine
        self._params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        limit = loaded.engine.limits.max_model_len - tokens
        loaded.prompts.max_model_len = _MAX_PROMPT  # longer prompts than the context's are cut
        self._prompts = [list(cut(_read(loaded, text), limit)) for text in asked]
        self._runs = count()

    def run(self, batch: int) -> _Run:
        """Run the first `batch` requests at once."""
        engine, options = self._engine, RequestOptions(cache_salt=f"run {next(self._runs)}")
        waiting = {
            engine.add_request(prompt, self._params, options) for prompt in self._prompts[:batch]
        }
        accepted: list[int] = []
        drafts, started = DraftStats(), 0.0
        tokens = steps = 0
        while engine.has_work:
            new: dict[str, int] = {}
            for update in engine.step():
                new[update.request_id] = new.get(update.request_id, 0) + len(update.token_ids)
                for stats in update.result.drafts.values() if update.result else ():
                    drafts = drafts.plus(stats)
            if not waiting:
                tokens, steps = tokens + sum(new.values()), steps + 1
                accepted += [each - 1 for each in new.values() if each]
            elif not waiting.difference(new):
                waiting.clear()
                started = time.perf_counter()
            waiting.difference_update(new)
        if engine.stats().proposer_failures:
            raise HeadraceError("the drafter failed, so it was not measured: see the log")
        return _Run(
            seconds=time.perf_counter() - started,
            tokens=tokens,
            steps=max(1, steps),
            accepted=tuple(accepted),
            drafts=drafts,
        )


@contextmanager
def _bench(
    model: str, options: Mapping[str, Any], asked: Sequence[str], tokens: int
) -> Iterator[_Bench]:
    """Load a model with room for all requests, and close it at the end."""
    longest = max(len(text.encode()) for text in asked) + 512 + tokens
    blocks = BATCHES[-1] * (-(-longest // KvConfig.block_size) + 1)
    loaded = load_model(model, engine_config({**options, "kv_blocks": blocks}))
    try:
        yield _Bench(loaded, asked, tokens)
    finally:
        loaded.prompts.close()
        loaded.engine.close()


def _read(loaded: LoadedModel, text: str) -> list[int]:
    reader = loaded.prompts
    if "default" in reader.templates:
        return list(reader.read_chat([{"role": "user", "content": text}]).token_ids)
    return list(reader.read_prompt(f"{text}\n\n").token_ids)
