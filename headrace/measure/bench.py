"""Latency and throughput under synthetic load, next to the limits of the roofline.

Random prompts never hit the prefix cache, and decoding is greedy.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from functools import reduce
from importlib.metadata import version
from statistics import mean, median
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from headrace.backend import lower_program
from headrace.checkpoint.load import Checkpoint
from headrace.config import OFFLINE, EngineConfig
from headrace.engine.engine import Engine
from headrace.errors import RequestError
from headrace.loader.backend_choice import with_backend
from headrace.loader.drafts import model_program
from headrace.loader.load import load_model, open_files
from headrace.loader.mode_price import losses, mode_price
from headrace.loader.options import engine_config
from headrace.measure.bench_rows import BenchSetup, LatencyRow, ThroughputRow
from headrace.measure.options import EngineOptions
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.outputs import Timing
from headrace.planner import hardware, host, roofline
from headrace.planner.hardware import Machine
from headrace.planner.money import per_million
from headrace.planner.utilisation import UseMeter, planned, roofs_of
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize
from headrace.sampling_params import SamplingParams
from headrace.stats import STEP_KINDS, StepTotals


def bench_latency(
    model: str,
    *,
    prompt_tokens: Sequence[int] = (512, 2048),
    output_tokens: Sequence[int] = (128,),
    depths: Sequence[int] = (0, 2048),
    repetitions: int = 5,
    price: float | None = None,
    on_progress: ProgressCallback = ignore_progress,
    **options: Unpack[EngineOptions],
) -> Iterator[LatencyRow]:
    """Measure prompt and decode speed of one request, at each depth of context.

    Args:
        prompt_tokens: numbers of prompt tokens to time; 0 is skipped.
        output_tokens: numbers of output tokens to time; 0 is skipped.
        depths: tokens of context before the timed tokens.
        repetitions: timed runs of each test.
        price: of this machine, in dollars an hour.
        options: fields of `EngineConfig`.

    Yields a row when it is measured. Raises RequestError if a test exceeds the context.
    """
    longest_prompt, longest_output = max(prompt_tokens, default=0), max(output_tokens, default=0)
    if not longest_prompt and not longest_output:
        raise RequestError("all prompt lengths and output lengths are 0; set at least one above 0")
    length = max(1, *depths) + max(longest_prompt, longest_output) + 1
    checkpoint, config = _open(model, options, length, max_num_seqs=1)

    def rows() -> Iterator[LatencyRow]:
        machine = _measure_machine(config, on_progress)
        limits = SpeedLimits(checkpoint, machine, config)
        maker = _RowMaker(_setup(model, checkpoint, config, machine), limits.meter, price)
        with Bench(model, config) as bench:
            for depth in depths:
                for tokens in filter(None, prompt_tokens):
                    on_progress(f"prompt of {tokens:,} tokens at depth {depth:,}", 0.0)
                    runs = bench.repeat(repetitions, depth + tokens, 1)
                    seconds = [
                        run.seconds_at(depth + tokens) - run.seconds_at(depth) for run in runs
                    ]
                    limit = limits.prompt(tokens, depth)
                    yield maker.latency("pp", tokens, depth, seconds, runs, limit)
                for tokens in filter(None, output_tokens):
                    on_progress(f"{tokens:,} tokens at depth {depth:,}", 0.0)
                    runs = bench.repeat(repetitions, max(1, depth), tokens + 1)
                    seconds = [run.tokens[0][-1] - run.tokens[0][0] for run in runs]
                    limit = limits.decode(tokens, depth)
                    yield maker.latency("tg", tokens, depth, seconds, runs, limit)

    return rows()


def bench_throughput(
    model: str,
    *,
    concurrency: Sequence[int] = (1, 4, 16, 32),
    prompt_tokens: int = 128,
    output_tokens: int = 128,
    price: float | None = None,
    on_progress: ProgressCallback = ignore_progress,
    **options: Unpack[EngineOptions],
) -> Iterator[ThroughputRow]:
    """Measure output speed and latencies of many requests at the same time.

    Each number in `concurrency` makes a row, which is yielded when it is measured. `price` is
    that of this machine, in dollars an hour; `options` are fields of `EngineConfig`. Raises
    RequestError if a request exceeds the context.
    """
    length = prompt_tokens + output_tokens
    checkpoint, config = _open(model, options, length, max_num_seqs=max(concurrency))

    def rows() -> Iterator[ThroughputRow]:
        machine = _measure_machine(config, on_progress)
        limits = SpeedLimits(checkpoint, machine, config)
        maker = _RowMaker(_setup(model, checkpoint, config, machine), limits.meter, price)
        with Bench(model, config) as bench:
            on_progress("warming up", 0.0)
            bench.run(1, prompt_tokens, output_tokens)
            for num_requests in concurrency:
                on_progress(f"{num_requests} requests at once", 0.0)
                run = bench.run(num_requests, prompt_tokens, output_tokens)
                limit = limits.output(num_requests, prompt_tokens, output_tokens)
                yield maker.throughput(run, prompt_tokens, output_tokens, limit)

    return rows()


def _open(
    model: str, options: EngineOptions, length: int, max_num_seqs: int
) -> tuple[Checkpoint, EngineConfig]:
    lengths = {"max_model_len": length, "max_num_seqs": max_num_seqs}
    config = engine_config({**options, **lengths}, OFFLINE)
    checkpoint = open_files(model, config)
    context = checkpoint.spec.max_context
    if length > context:
        raise RequestError(
            f"the benchmark needs a context of {length:,} tokens, and the model's ends at "
            f"{context:,}; shorten its prompts, outputs or depths"
        )
    return checkpoint, with_backend(config, checkpoint)


def _measure_machine(config: EngineConfig, on_progress: ProgressCallback) -> Machine:
    on_progress("measuring this machine", 0.0)
    machine = hardware.measure(config.threads, config.backend)
    host.reset_peak_memory()
    on_progress("loading the model", 0.0)
    return machine


def _setup(
    model: str, checkpoint: Checkpoint, config: EngineConfig, machine: Machine
) -> BenchSetup:
    files = [checkpoint.path]
    if checkpoint.path.is_dir():
        files = sorted(checkpoint.path.glob("*.safetensors"))
    chosen_isa = "" if machine.is_gpu else os.environ.get("HEADRACE_ISA", "")
    lossy = losses(config, checkpoint)
    price = mode_price(model, config, checkpoint, checkpoint.load_tokenizer)
    return BenchSetup(
        model=model,
        name=checkpoint.spec.name,
        file_bytes=sum(file.stat().st_size for file in files),
        parameters=sum(tensor.rows * tensor.cols for tensor in checkpoint.tensors.values()),
        version=version("headrace"),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        backend=config.backend,
        isa=chosen_isa or machine.isa,
        machine=machine,
        kv_dtype=config.kv_format,
        lossy=lossy and f"{lossy} ({price})",
    )


class Run(NamedTuple):
    """Times of one run, in seconds from the submission."""

    tokens: list[list[float]]
    rows: list[tuple[int, float]]
    """Number of rows computed so far, and the time, after each step."""
    timings: list[Timing]
    """Of each request."""
    steps: dict[str, StepTotals]
    """By `STEP_KINDS`."""

    def seconds_at(self, row: int) -> float:
        """Seconds after which `row` rows were computed, spread evenly over a step."""
        counts, times = zip((0, 0.0), *self.rows, strict=True)
        return float(np.interp(row, counts, times))


class Bench:
    def __init__(self, model: str, config: EngineConfig) -> None:
        engine, _, tokenizer, checkpoint = load_model(model, config)
        self._prepare(engine, tokenizer.prefix_ids, checkpoint, config.seed)

    def _prepare(
        self, engine: Engine, prefix: Sequence[int], checkpoint: Checkpoint, seed: int | None
    ) -> None:
        self._engine, self._prefix, self.checkpoint = engine, prefix, checkpoint
        self._random = np.random.default_rng(seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._engine.close()

    def repeat(self, repetitions: int, prompt_len: int, num_tokens: int) -> list[Run]:
        """Time one request `repetitions` times, after a run that warms up."""
        self.run(1, prompt_len, num_tokens)
        return [self.run(1, prompt_len, num_tokens) for _ in range(repetitions)]

    def run(self, num_requests: int, prompt_len: int, num_tokens: int) -> Run:
        """Submit the requests together. Raises the error of a failed request."""
        engine = self._engine
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        vocab_size = self.checkpoint.spec.vocab_size
        prompts = self._random.integers(vocab_size, size=(num_requests, prompt_len))
        prefix = self._prefix[:prompt_len]
        prompts[:, : len(prefix)] = prefix

        rows: list[tuple[int, float]] = []
        timings: list[Timing] = []
        stats_before, start = engine.stats(), perf_counter()
        tokens: dict[str, list[float]] = {
            engine.add_request(prompt, params): [] for prompt in prompts.tolist()
        }
        while engine.has_work:
            updates, now = engine.step(), perf_counter() - start
            rows.append((engine.stats().rows - stats_before.rows, now))
            for update in updates:
                times, count = tokens[update.request_id], len(update.token_ids)
                before = times[-1] if times else now
                # Tokens of one update arrive together; spread them evenly over the step.
                times += [before + (now - before) * (i + 1) / count for i in range(count)]
                if result := update.result:
                    timings.append(result.timing)
                    if result.error:
                        raise result.error
        stats = engine.stats()
        steps = {
            kind: getattr(stats, kind).minus(getattr(stats_before, kind)) for kind in STEP_KINDS
        }
        return Run(list(tokens.values()), rows, timings, steps)


class SpeedLimits:
    """Maximum tokens/s of a model by the roofline."""

    def __init__(self, checkpoint: Checkpoint, machine: Machine, config: EngineConfig) -> None:
        traced = model_program(config, checkpoint)
        self._program = lower_program(config.backend, traced, checkpoint.tensors)
        self._machine = machine
        self._kv_bytes = number_bytes(self._program.kv_groups, config.kv_format)
        timer = planned(self._program, config.backend, config.threads, machine)
        self.meter = UseMeter(self._program, self._kv_bytes, roofs_of(machine), timer)

    def prompt(self, tokens: int, depth: int) -> float:
        seconds = self._prefill_seconds(depth + tokens) - self._prefill_seconds(depth)
        return tokens / seconds

    def decode(self, tokens: int, depth: int, num_requests: int = 1) -> float:
        """From `depth` to `depth + tokens`, of all requests."""
        mean_depth = depth + tokens // 2
        return roofline.decode_limit(
            self._program, self._machine, mean_depth, self._kv_bytes, num_requests
        )

    def output(self, num_requests: int, prompt_tokens: int, output_tokens: int) -> float:
        """Output tokens/s of a whole run. One step computes all prompts."""
        prompts = StepSize(((0, prompt_tokens),) * num_requests, num_requests, self._kv_bytes)
        seconds = roofline.step_seconds(self._program, prompts, self._machine)
        num_decoded = output_tokens - 1
        decode = self.decode(num_decoded, prompt_tokens, num_requests)
        return num_requests * output_tokens / (seconds + num_requests * num_decoded / decode)

    def _prefill_seconds(self, length: int) -> float:
        if not length:
            return 0.0
        limit = roofline.prefill_limit(self._program, self._machine, length, self._kv_bytes)
        return length / limit


class _RowMaker:
    def __init__(self, setup: BenchSetup, meter: UseMeter, price: float | None) -> None:
        self._setup = setup
        self._meter = meter
        self._price = price

    def latency(
        self,
        kind: str,
        tokens: int,
        depth: int,
        seconds: list[float],
        runs: list[Run],
        limit: float,
    ) -> LatencyRow:
        speed = tokens / median(seconds)
        first_tokens = [run.tokens[0][0] for run in runs]
        steps = "prompt_steps" if kind == "pp" else "decode_steps"
        return LatencyRow(
            setup=self._setup,
            test=f"{kind}{tokens}",
            depth=depth,
            tokens_per_second=speed,
            tokens_per_second_min=tokens / max(seconds),
            tokens_per_second_max=tokens / min(seconds),
            ms_per_token=1000 / speed,
            first_token=median(first_tokens),
            limit=limit,
            share_of_limit=speed / limit,
            peak_memory=host.peak_memory(),
            timing=_mean_timing(runs),
            use=self._meter.of(reduce(StepTotals.plus, [run.steps[steps] for run in runs])),
            dollars_per_million=self._cost(median(seconds), tokens),
            samples={"seconds": seconds, "first_token": first_tokens},
        )

    def throughput(
        self, run: Run, prompt_tokens: int, output_tokens: int, limit: float
    ) -> ThroughputRow:
        times = np.array(run.tokens)  # [requests, output tokens]
        num_requests = len(times)
        first, between = times[:, 0], np.diff(times).reshape(-1)
        seconds = float(times.max())
        speed = times.size / seconds
        uses = {kind.removesuffix("_steps"): self._meter.of(run.steps[kind]) for kind in STEP_KINDS}
        prompt_seconds = run.steps["prompt_steps"].seconds
        prompt = self._cost(prompt_seconds, num_requests * prompt_tokens)
        output = self._cost(seconds - prompt_seconds, times.size)
        return ThroughputRow(
            setup=self._setup,
            test=f"{num_requests} x ({prompt_tokens} + {output_tokens})",
            concurrency=num_requests,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            tokens_per_second=speed,
            first_token=_percentile(first, 50),
            first_token_p95=_percentile(first, 95),
            between_tokens=_percentile(between, 50),
            between_tokens_p95=_percentile(between, 95),
            limit=limit,
            share_of_limit=speed / limit,
            peak_memory=host.peak_memory(),
            timing=_mean_timing([run]),
            uses={kind: use for kind, use in uses.items() if use},
            dollars_per_million=(
                None if prompt is None or output is None else {"prompt": prompt, "output": output}
            ),
            samples={
                "seconds": seconds,
                "first_token": first.tolist(),
                "between_tokens": between.round(6).tolist(),
            },
        )

    def _cost(self, seconds: float, tokens: int) -> float | None:
        return None if self._price is None else per_million(self._price, seconds, tokens)


def _mean_timing(runs: list[Run]) -> Timing:
    timings = [astuple(timing) for run in runs for timing in run.timings]
    return Timing(*map(mean, zip(*timings, strict=True)))


def _percentile(values: NDArray[np.float64], percent: int) -> float | None:
    return float(np.percentile(values, percent)) if values.size else None
