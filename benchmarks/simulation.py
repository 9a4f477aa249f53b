"""Simulated requests next to the same requests on the real engine, on this machine.

    python benchmarks/simulation.py [--model smollm2] [--trace NAME ...] [--json FILE]

Three traces: overload, 90 % of the engine's capacity, and chats of several turns. The engine serves
each as `AsyncLLM` with its defaults, in this process; the simulation then predicts it with the
stored calibration of the machine (`headrace calibrate --machine`), and the mean of the bandwidths
that were read before and after. Both see equal prompts, output lengths and KV blocks. The machine
must be idle.
"""

import argparse
import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from headrace.async_llm import AsyncLLM
from headrace.measure.place import THIS, find_place
from headrace.measure.placed_model import open_model
from headrace.measure.table import print_table
from headrace.parallel.mesh import Mesh
from headrace.planner.hardware import bandwidth_now
from headrace.sampling_params import SamplingParams
from headrace.simulator.report import Latencies, Percentiles
from headrace.simulator.simulate import deploy_at, load_trace
from headrace.simulator.trace import Conversation, Trace

TRACES = {
    "overload": "lognormal:prompt=256,output=96,rate=8.0,burstiness=0.5,requests=280",
    "90 % of capacity": "lognormal:prompt=256,output=96,rate=5.66,requests=330",
    "chats": "chat:rate=0.45,turns=4,requests=120,prompt=96,output=96,prefix=256,pause=3",
}
"""Workloads by name; the second rate is 90 % of the requests per second of the first trace, as
measured.
"""
KV_BLOCKS = 2048
BLOCK_SIZE = 32
MAX_MODEL_LEN = 4096


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


def measured(llm: AsyncLLM, trace: Trace) -> dict[str, float]:
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
) -> dict[str, float]:
    return {
        "output, tokens/s": tokens_per_second,
        "TTFT p50, ms": 1e3 * first.p50,
        "TTFT p95, ms": 1e3 * first.p95,
        "TPOT p50, ms": 1e3 * later.p50,
        "TPOT p95, ms": 1e3 * later.p95,
        "whole request p50, ms": 1e3 * total.p50,
        "whole request p95, ms": 1e3 * total.p95,
    }


def predicted(model: str, trace: Trace, bandwidth: float) -> dict[str, float]:
    place = find_place(THIS, Mesh())
    place = replace(place, machine=replace(place.machine, bandwidth=bandwidth))
    deployment = deploy_at(
        place, open_model(model), kv_blocks=KV_BLOCKS, max_model_len=MAX_MODEL_LEN
    )
    report = deployment.run(trace)
    own: Latencies = report.latencies
    return figures(report.output_tokens_per_second, own.first_token, own.per_token, own.total) | {
        "hit rate": report.hit_rate
    }


def show(name: str, real: dict[str, float], found: dict[str, float]) -> None:
    def digits(value: float) -> str:
        return f"{value:,.1%}" if value < 1 else f"{value:,.1f}"

    rows = [
        [figure, digits(real[figure]), digits(found[figure]), error(real[figure], found[figure])]
        for figure in real
    ]
    print_table(["", ">measured", ">simulated", ">error"], rows, name)
    print()


def error(real: float, found: float) -> str:
    return f"{found / real - 1:+.1%}" if real else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="simulation.py", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--trace", action="append", choices=list(TRACES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for a line for each trace")
    args = parser.parse_args()
    lines: list[str] = []
    for name in args.trace or TRACES:
        trace = load_trace(TRACES[name], 0)
        # A new engine each time, without the prefixes of the trace.
        with AsyncLLM(args.model, kv_blocks=KV_BLOCKS, max_model_len=MAX_MODEL_LEN) as llm:
            asyncio.run(fill(llm))
            before = bandwidth_now()
            real = measured(llm, trace)
            bandwidth = (before + bandwidth_now()) / 2
        found = predicted(args.model, trace, bandwidth)
        show(f"{name}: {TRACES[name]}, {bandwidth / 1e9:.1f} GB/s", real, found)
        lines.append(json.dumps({"trace": name, "measured": real, "simulated": found}) + "\n")
    if args.json:
        args.json.write_text("".join(lines))


if __name__ == "__main__":
    main()
