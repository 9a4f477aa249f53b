"""Two replicas with one thread each: `headrace serve --replicas 2` on Ray, and the same engines
with `headrace route`, in turns.

    python benchmarks/replicas.py --rounds 5

It prints output tokens per second of many concurrent streams, and the processor time of all
processes. Figures are medians (min-max) over the rounds. Each round starts both servers.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/ starts servers

from headrace.measure.table import print_table
from tests.scaleout.on_ray import descendants
from tests.server.running import Running

TICKS = os.sysconf("SC_CLK_TCK")
ENGINE = ("--threads", "1", "--max-num-seqs", "32", "--max-model-len", "1024")
KINDS = {
    "replicas": "ray::ServeReplica:headrace:replica",
    "controller of Ray Serve": "ray::ServeController",
    "raylet, GCS, agents": "",
}
"""Processes of a frontend on Ray, by the start of their command lines."""


@contextmanager
def running(model: str, *flags: str, command: str = "serve") -> Iterator[Running]:
    server = Running(model, *flags, command=command)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def on_ray(model: str) -> Iterator[tuple[int, Callable[[], Counter[str]]]]:
    """The port of a server on Ray, and the processor seconds of its processes by kind."""
    with running(model, "--replicas", "2", *ENGINE) as server:
        yield (
            server.port,
            lambda: (
                Counter({"frontend": used(server.process.pid)})
                + of_kinds(descendants(server.process.pid))
            ),
        )


def of_kinds(processes: dict[int, str]) -> Counter[str]:
    total = Counter[str]()
    for pid, command in processes.items():
        total[next(kind for kind, begins in KINDS.items() if command.startswith(begins))] += used(
            pid
        )  # type: ignore[assignment]
    return total


@contextmanager
def routed(model: str) -> Iterator[tuple[int, Callable[[], Counter[str]]]]:
    """The port of `headrace route`, and the processor seconds of it and its workers."""
    with ExitStack() as held:
        workers = [held.enter_context(running(model, "--worker", *ENGINE)) for _ in range(2)]
        urls = ",".join(f"http://127.0.0.1:{worker.port}" for worker in workers)
        frontend = held.enter_context(
            running(model, "--workers", urls, "--max-model-len", "1024", command="route")
        )
        yield frontend.port, lambda: seconds_of_routed(frontend, workers)


def seconds_of_routed(frontend: Running, workers: list[Running]) -> Counter[str]:
    engines = sum(used(worker.engine_pid) for worker in workers)
    return Counter(
        {
            "frontend": used(frontend.process.pid),
            "engines": engines,
            "their API": sum(used(one.process.pid) for one in workers),
        }
    )  # type: ignore[dict-item]


def used(pid: int) -> float:
    """Processor seconds of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


async def stream(port: int, number: int, tokens: int) -> int:
    """Send a request, read its stream to the end, and return the number of events with text."""
    body = json.dumps(
        {
            "messages": [
                {
                    "role": "user",
                    "content": f"Write a long story of {number} children and a water mill.",
                }
            ],
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
        f"application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body.encode())
    read = b""
    while b"data: [DONE]" not in read[-64:] and (chunk := await reader.read(1 << 16)):
        read += chunk
    writer.close()
    events = [
        json.loads(line[6:]) for line in read.decode().splitlines() if line.startswith("data: {")
    ]
    assert events[-1]["usage"]["completion_tokens"] == tokens, events[-1]
    return len(events) - 1


async def load(port: int, streams: int, requests: int, tokens: int) -> tuple[float, int]:
    """Seconds of these requests with this number of concurrent streams, and their events."""
    left, events = iter(range(requests)), 0

    async def lane() -> None:
        nonlocal events
        for number in left:
            came = await stream(port, number, tokens)
            events += came

    begun = time.monotonic()
    await asyncio.gather(*(lane() for _ in range(streams)))
    return time.monotonic() - begun, events


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    speeds: dict[str, list[float]] = {}
    shares: dict[str, list[Counter[str]]] = {}
    for turn in range(args.rounds):
        for name, serving in (("headrace route", routed), ("Ray", on_ray)):
            with serving(args.model) as (port, seconds):
                asyncio.run(load(port, args.streams, args.streams, 8))  # warm
                before = seconds()
                took, events = asyncio.run(load(port, args.streams, args.requests, args.tokens))
                spent = seconds() - before
            speeds.setdefault(name, []).append(args.requests * args.tokens / took)
            shares.setdefault(name, []).append(spent)
            print(
                f"{turn} {name}: {speeds[name][-1]:.0f} tokens/s, {events} events, {dict(spent)}",
                file=sys.stderr,
            )
    ratios = [
        ray / route for ray, route in zip(speeds["Ray"], speeds["headrace route"], strict=True)
    ]
    costs = [
        route.total() / ray.total()
        for ray, route in zip(shares["Ray"], shares["headrace route"], strict=True)
    ]
    rows = [[name, spread(values)] for name, values in speeds.items()] + [
        ["Ray / route, by round", spread(ratios)]
    ]
    rows.append(
        ["the same by processor time", spread(costs)]
    )  # which neighbours on a shared machine disturb less
    print_table(["output tokens/s", ""], rows)
    print_table(["processor time", "s", "share"], list(times(shares)))


def times(shares: dict[str, list[Counter[str]]]) -> Iterator[list[str]]:
    for name, rounds in shares.items():
        for kind in rounds[0]:
            seconds = [one[kind] for one in rounds]
            yield [
                f"{name}: {kind}",
                spread(seconds),
                f"{statistics.median(one[kind] / one.total() for one in rounds):.1%}",
            ]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


if __name__ == "__main__":
    main()
