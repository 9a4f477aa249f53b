"""Timed runs of synthetic requests through the real engine, and the rows that `headrace bench`
makes of them.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.backend import lower_program
from headrace.checkpoint.load import Checkpoint
from headrace.config import EngineConfig
from headrace.loader.load import load_model
from headrace.model import trace_model
from headrace.planner import host, roofline
from headrace.planner.hardware import Machine
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize
from headrace.request import SamplingParams

Row = dict[str, Any]
"""What was measured, as it goes to JSON: seconds, bytes, tokens per second."""
Say = Callable[[str], None]
"""Is told what is being measured."""


class Run(NamedTuple):
    """What one run of requests, submitted together, came to. Times are seconds since then."""

    tokens: list[list[float]]
    """When each output token of each request was there."""
    rows: list[tuple[int, float]]
    """How many rows had been computed after each step, and when."""

    def seconds_at(self, row: int) -> float:
        """When so many rows had been computed; within a step, as if its rows came one after the
        other.
        """
        counts, times = zip((0, 0.0), *self.rows, strict=True)
        return float(np.interp(row, counts, times))


class Bench:
    """A loaded model under synthetic load: random tokens of its vocabulary, greedy, with no end
    before the last token.

    Every prompt is a new one, so that nothing kept of past prompts can help. Use it in a `with`
    block.
    """

    def __init__(self, model: str, config: EngineConfig) -> None:
        self._engine, _, _, self.checkpoint = load_model(model, config)
        self._random = np.random.default_rng(config.seed)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._engine.close()

    def repeat(self, repetitions: int, prompt_len: int, num_tokens: int) -> list[Run]:
        """So many runs of one request, after one that does not count."""
        return [self.run(1, prompt_len, num_tokens) for _ in range(repetitions + 1)][1:]

    def run(self, num_requests: int, prompt_len: int, num_tokens: int) -> Run:
        """Submit the requests at once and wait for the last. Raises the error of a request that
        fails.
        """
        engine, params = (
            self._engine,
            SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
        )
        prompts = self._random.integers(
            self.checkpoint.spec.vocab_size, size=(num_requests, prompt_len)
        ).tolist()
        rows: list[tuple[int, float]] = []
        rows_before, start = engine.stats().rows, perf_counter()
        tokens: dict[str, list[float]] = {
            engine.add_request(prompt, params): [] for prompt in prompts
        }
        while engine.has_work:
            updates, now = engine.step(), perf_counter() - start
            rows.append((engine.stats().rows - rows_before, now))
            for update in updates:
                times, count = tokens[update.request_id], len(update.token_ids)
                before = times[-1] if times else now
                times += [
                    before + (now - before) * (i + 1) / count for i in range(count)
                ]  # those that come together, as if evenly
                if update.result and update.result.error:
                    raise update.result.error
        return Run(list(tokens.values()), rows)


class SpeedLimits:
    """Most tokens per second that the roofline allows a model on a machine, with the backend and
    the number format of KV in `config`.
    """

    def __init__(self, checkpoint: Checkpoint, machine: Machine, config: EngineConfig) -> None:
        self._program = lower_program(
            config.backend, trace_model(checkpoint.spec, checkpoint.tensors), checkpoint.tensors
        )
        self._machine = machine
        self._kv_bytes = number_bytes(self._program.kv_groups, config.kv_dtype)

    def prompt(self, tokens: int, depth: int) -> float:
        """Of a prompt, from token `depth` to `depth + tokens`."""

        def seconds(length: int) -> float:
            return (
                length
                / roofline.prefill_limit(self._program, self._machine, length, self._kv_bytes)
                if length
                else 0.0
            )

        return tokens / (seconds(depth + tokens) - seconds(depth))

    def decode(self, tokens: int, depth: int, num_requests: int = 1) -> float:
        """Of all requests together, while each goes from `depth` to `depth + tokens` tokens of
        context.
        """
        return roofline.decode_limit(
            self._program, self._machine, depth + tokens // 2, self._kv_bytes, num_requests
        )

    def output(self, num_requests: int, prompt_tokens: int, output_tokens: int) -> float:
        """Output of a whole run: one step for all prompts, which also gives the first tokens, then
        a row of each request a step.
        """
        prompts = StepSize(((0, prompt_tokens),) * num_requests, num_requests, self._kv_bytes)
        seconds = roofline.step_seconds(self._program, prompts, self._machine)
        more = output_tokens - 1
        return (
            num_requests
            * output_tokens
            / (seconds + num_requests * more / self.decode(more, prompt_tokens, num_requests))
        )


def latency(
    bench: Bench,
    limits: SpeedLimits,
    say: Say,
    pp: Sequence[int],
    tg: Sequence[int],
    depth: Sequence[int],
    repetitions: int,
) -> Iterator[Row]:
    """A row for each prompt length and each output length at each depth; one run more comes before
    each, and does not count.

    `pp` times the last tokens of a prompt of depth + pp, `tg` the tokens that follow the first one
    after a prompt of `depth`.
    """
    for context in depth:
        for tokens in filter(None, pp):
            say(f"prompt of {tokens:,} tokens at depth {context:,}")
            runs = bench.repeat(repetitions, context + tokens, 1)
            seconds = [run.seconds_at(context + tokens) - run.seconds_at(context) for run in runs]
            yield _latency_row("pp", tokens, context, seconds, runs, limits.prompt(tokens, context))
        for tokens in filter(None, tg):
            say(f"{tokens:,} tokens at depth {context:,}")
            runs = bench.repeat(repetitions, max(1, context), tokens + 1)
            seconds = [run.tokens[0][-1] - run.tokens[0][0] for run in runs]
            yield _latency_row("tg", tokens, context, seconds, runs, limits.decode(tokens, context))


def _latency_row(
    test: str, tokens: int, depth: int, seconds: list[float], runs: list[Run], limit: float
) -> Row:
    speed = tokens / median(seconds)
    return {
        "test": f"{test}{tokens}",
        "depth": depth,
        "tokens_per_second": speed,
        "tokens_per_second_min": tokens / max(seconds),
        "tokens_per_second_max": tokens / min(seconds),
        "ms_per_token": 1000 / speed,
        "first_token": median(run.tokens[0][0] for run in runs),
        "limit": limit,
        "share_of_limit": speed / limit,
        "peak_memory": host.peak_memory(),
        "samples": {"seconds": seconds, "first_token": [run.tokens[0][0] for run in runs]},
    }


def throughput(
    bench: Bench,
    limits: SpeedLimits,
    say: Say,
    concurrency: Sequence[int],
    prompt_tokens: int,
    output_tokens: int,
) -> Iterator[Row]:
    """A row for each number of requests that are submitted at once; a single request comes first
    and does not count.
    """
    say("warming up")
    bench.run(1, prompt_tokens, output_tokens)
    for num_requests in concurrency:
        say(f"{num_requests} requests at once")
        times = np.array(
            bench.run(num_requests, prompt_tokens, output_tokens).tokens
        )  # [requests, output tokens]
        first, between, seconds = times[:, 0], np.diff(times).reshape(-1), float(times.max())
        speed, limit = (
            times.size / seconds,
            limits.output(num_requests, prompt_tokens, output_tokens),
        )
        yield {
            "test": f"{num_requests} x ({prompt_tokens} + {output_tokens})",
            "concurrency": num_requests,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "tokens_per_second": speed,
            "first_token": _percentile(first, 50),
            "first_token_p95": _percentile(first, 95),
            "between_tokens": _percentile(between, 50),
            "between_tokens_p95": _percentile(between, 95),
            "limit": limit,
            "share_of_limit": speed / limit,
            "peak_memory": host.peak_memory(),
            "samples": {
                "seconds": seconds,
                "first_token": first.tolist(),
                "between_tokens": between.round(6).tolist(),
            },
        }


def _percentile(values: NDArray[np.float64], percent: int) -> float | None:
    return float(np.percentile(values, percent)) if values.size else None
