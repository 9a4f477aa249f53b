"""Simulated requests next to the same requests on the real engine, on this machine.

    python benchmarks/simulation.py [--model smollm2] [--trace NAME ...] [--json FILE]

Three traces: overload, 90 % of the engine's capacity, and chats of several turns. The engine serves
each as `AsyncLLM` with its defaults, in this process; the simulation then predicts it with the
stored calibration of the machine (`headrace calibrate --machine`), and its bandwidth and rates as
measured before and after: they change by the minute on a shared machine. Both see equal prompts,
output lengths and KV blocks.

A second simulation gets the measured times: its predictions are multiplied by the mean factors of
the runs of the executable, and of the engine around them. If it agrees with the engine and the
first does not, the schedule is right and the times are wrong. The machine must be idle: the title
has the processors that other programs used.
"""

import argparse
import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from engine_record import EngineRecord, Factors, OtherPrograms, ScaledCosts

from headrace.async_llm import AsyncLLM
from headrace.measure.op_profile import median_machine
from headrace.measure.place import THIS, find_place
from headrace.measure.placed_model import open_model
from headrace.measure.table import print_table
from headrace.parallel.mesh import Mesh
from headrace.planner.hardware import Machine, measure
from headrace.sampling_params import SamplingParams
from headrace.simulator.report import Latencies, Percentiles
from headrace.simulator.simulate import Deployment, deploy_at, load_trace
from headrace.simulator.trace import Conversation, Trace

TRACES = {
    "overload": "lognormal:prompt=256,output=96,rate=8.0,burstiness=0.5,requests=280",
    "90 % of capacity": "lognormal:prompt=256,output=96,rate=5.66,requests=330",
    "chats": "chat:rate=0.45,turns=4,requests=120,prompt=96,output=96,prefix=256,pause=3",
}
"""Workloads by name; the second rate is 90 % of the requests per second of the first trace, as
measured.
"""
KV_BLOCKS = 1024
BLOCK_SIZE = 32
MAX_MODEL_LEN = 4096
MACHINES = 3
"""Measurements of the roofs on either side of a trace."""


class Requests:
    """Times of requests on the engine, in seconds."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._begun = perf_counter()
        self.ends: list[float] = []
        self.rows: list[tuple[float, float, float]] = []
        """Seconds to the first token, for each later token, and in all."""
        self.output_tokens = 0
        self.cached = self.prompt = 0

    async def run(self, trace: Trace) -> None:
        self._begun = perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for conversation in trace:
                tasks.create_task(self._converse(conversation))

    async def _converse(self, conversation: Conversation) -> None:
        await asyncio.sleep(max(0.0, self._begun + conversation.start - perf_counter()))
        said: list[int] = []
        for turn in conversation.turns:
            if said:
                await asyncio.sleep(turn.pause)
            said += turn.tokens
            params = SamplingParams(temperature=0, max_tokens=turn.num_tokens, ignore_eos=True)
            started = perf_counter()
            result = await self._llm.generate({"prompt_token_ids": said}, params)
            seconds = perf_counter() - started

            tokens, timing = result.outputs[0].token_ids, result.timing
            after = sum(asdict(timing).values()) - timing.queue - timing.prefill
            self.rows.append((seconds - after, after / max(1, len(tokens) - 1), seconds))
            self.ends.append(started + seconds - self._begun)
            self.output_tokens += len(tokens)
            self.prompt += len(said)
            self.cached += result.cached_tokens
            said = [*said, *tokens]


async def fill(llm: AsyncLLM) -> None:
    """Write each KV block once: the system provides memory at the first write, which takes up to
    5 ms for 2 MB on a virtual machine.
    """
    length = MAX_MODEL_LEN // 2
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0, max_tokens=1)
    for _ in range(KV_BLOCKS * BLOCK_SIZE // length + 1):
        prompt = rng.integers(1000, 40_000, length).tolist()
        await llm.generate({"prompt_token_ids": prompt}, params)


Figures = dict[str, float]


def measured(llm: AsyncLLM, trace: Trace) -> Figures:
    requests = Requests(llm)
    asyncio.run(requests.run(trace))
    first, later, total = zip(*requests.rows, strict=True)
    return figures(
        requests.output_tokens / max(requests.ends),
        Percentiles.of(first),
        Percentiles.of(later),
        Percentiles.of(total),
    ) | {"hit rate": requests.cached / requests.prompt}


def figures(
    tokens_per_second: float, first: Percentiles, later: Percentiles, total: Percentiles
) -> Figures:
    return {
        "output, tokens/s": tokens_per_second,
        "TTFT p50, ms": 1e3 * first.p50,
        "TTFT p95, ms": 1e3 * first.p95,
        "TPOT p50, ms": 1e3 * later.p50,
        "TPOT p95, ms": 1e3 * later.p95,
        "whole request p50, ms": 1e3 * total.p50,
        "whole request p95, ms": 1e3 * total.p95,
    }


def deployed(model: str, machine: Machine) -> Deployment:
    """The engine of the measurement on this machine with the roofs of these minutes."""
    place = replace(find_place(THIS, Mesh()), machine=machine)
    checkpoint = open_model(model)
    return deploy_at(place, checkpoint, kv_blocks=KV_BLOCKS, max_model_len=MAX_MODEL_LEN)


def scaled(deployment: Deployment, factors: Factors) -> Deployment:
    """A deployment whose predicted times are multiplied by measured factors."""
    costs = ScaledCosts(deployment.setup.costs, factors)
    return replace(deployment, setup=replace(deployment.setup, costs=costs))


def simulated(deployment: Deployment, trace: Trace) -> Figures:
    report = deployment.run(trace)
    own: Latencies = report.latencies
    return figures(report.output_tokens_per_second, own.first_token, own.per_token, own.total) | {
        "hit rate": report.hit_rate
    }


def show(title: str, real: Figures, found: Figures, with_times: Figures) -> None:
    def digits(value: float) -> str:
        return f"{value:,.1%}" if value < 1 else f"{value:,.1f}"

    rows = [
        [
            figure,
            digits(real[figure]),
            digits(found[figure]),
            error(real[figure], found[figure]),
            digits(with_times[figure]),
            error(real[figure], with_times[figure]),
        ]
        for figure in real
    ]
    headings = ["", ">measured", ">simulated", ">error", ">with measured times", ">error"]
    print_table(headings, rows, title)
    print()


def error(real: float, found: float) -> str:
    return f"{found / real - 1:+.1%}" if real else ""


def compare(model: str, name: str) -> dict[str, Any]:
    """Run a trace, simulate it, and print both."""
    trace = load_trace(TRACES[name], 0)
    # A new engine each time, without the prefixes of the trace.
    with AsyncLLM(model, kv_blocks=KV_BLOCKS, max_model_len=MAX_MODEL_LEN) as llm:
        asyncio.run(fill(llm))
        record, machines = EngineRecord(llm), [measure() for _ in range(MACHINES)]
        others = OtherPrograms()
        real = measured(llm, trace)
        here, elsewhere = others.processors()
        machine = median_machine([*machines, *(measure() for _ in range(MACHINES))])
    deployment = deployed(model, machine)
    factors = record.factors(deployment.setup.costs, deployment.setup.kv_bytes)
    found = simulated(deployment, trace)
    with_times = simulated(scaled(deployment, factors), trace)
    title = (
        f"{name}: {TRACES[name]}\n"
        f"{machine.bandwidth / 1e9:.1f} GB/s, {machine.rates['int8'] / 1e12:.2f} T/s in int8; "
        f"other programs use {here:.2f} processors, other machines {elsewhere:.2f}\n"
        f"Runs take {factors.runs:.2f} times their prediction, and the engine around them "
        f"{factors.around:.2f} times."
    )
    show(title, real, found, with_times)
    return {
        "trace": name,
        "bandwidth": machine.bandwidth,
        "rates": dict(machine.rates),
        "factors": factors._asdict(),
        "other programs": here,
        "other machines": elsewhere,
        "measured": real,
        "simulated": found,
        "with measured times": with_times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="simulation.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--trace", action="append", choices=list(TRACES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="file that gets a line per trace")
    args = parser.parse_args()
    for name in args.trace or TRACES:
        line = json.dumps(compare(args.model, name))
        if args.json:
            with args.json.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
