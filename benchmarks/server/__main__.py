"""Cost of HTTP, and comparison with another server: tokens/s, time to first token and between
tokens.

    python benchmarks/server    the server and the engine alone, at 1, 8 and 32 streams
    python benchmarks/server --peer 'llama-server -m {model} --port {port} -np 32 -c 65536 -t 2'

The engine alone runs the same requests in its own process, while a dummy process uses the measured
CPU time of the load generator; the raw figure is without the dummy. The sides take turns. A peer is
any server with OpenAI's completions: its command has {model} and {port}, and it is ready once
/health responds.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace import AsyncLLM, SamplingParams
from headrace.measure.table import print_table

LOAD = Path(__file__).with_name("load.py")
BURN = """
import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + share / 100
    while time.perf_counter() < end:
        pass
    time.sleep(max(0.0, 1 - share) / 100)
"""
Run = dict[str, Any]


def bodies(count: int, prompt: int, output: int) -> list[Run]:
    """Requests without common prefixes."""
    rng = np.random.default_rng(0)
    words = [
        " ".join(f"{word:x}" for word in rng.integers(16, 4096, size=prompt // 2))
        for _ in range(count)
    ]
    return [
        {"prompt": text, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        for text in words
    ]


def load(url: str, streams: int, asked: list[Run]) -> Run:
    done = subprocess.run(
        [sys.executable, str(LOAD), url, str(streams)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"benchmarks/server: {url}: {done.stderr.strip().splitlines()[-1]}")
    found: Run = json.loads(done.stdout)
    return found


def alone(llm: AsyncLLM, streams: int, asked: list[Run], burn: float) -> Run:
    """Run the requests in this process."""
    left, tokens = list(reversed(asked)), 0

    async def lane() -> None:
        nonlocal tokens
        while left:
            body = left.pop()
            result = await llm.generate(
                body["prompt"],
                SamplingParams(max_tokens=body["max_tokens"], temperature=0, ignore_eos=True),
            )
            tokens += len(result.outputs[0].token_ids)

    async def all_lanes() -> None:
        await asyncio.gather(*(lane() for _ in range(streams)))

    burner = subprocess.Popen([sys.executable, "-c", BURN, str(burn)]) if burn else None
    try:
        begun = time.perf_counter()
        asyncio.run(all_lanes())
        return {"tokens": tokens, "seconds": time.perf_counter() - begun}
    finally:
        if burner:
            burner.kill()
            burner.wait()


@contextlib.contextmanager
def server(command: list[str], port: int) -> Iterator[str]:
    """Start a server and wait until it is ready."""
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(f"{url}/health", timeout=5),
                ):
                    break
                if process.poll() is not None:
                    sys.exit(f"benchmarks/server: `{shlex.join(command)}` ended")
                time.sleep(0.05)
            yield url
        finally:
            process.terminate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def row(name: str, streams: int, runs: list[Run], base: list[float]) -> list[str]:
    """Medians over the runs, and the ratio by pairs of turns."""
    rates = [run["tokens"] / run["seconds"] for run in runs]
    ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
    cells = [
        name,
        str(streams),
        f"{statistics.median(rates):,.0f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
    ]
    for what in ("first", "gaps", "each"):
        for percent in (50, 99):
            values = [
                1000 * float(np.percentile(run[what], percent)) for run in runs if run.get(what)
            ]
            cells.append(f"{statistics.median(values):,.1f}" if values else "")
    return cells


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--streams",
        type=lambda text: [int(word) for word in text.split(",")],
        default=[1, 8, 32],
        metavar="N,...",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=3,
        metavar="N",
        help="requests per stream (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=128,
        metavar="N",
        help="approximate tokens of a prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=int,
        default=128,
        metavar="N",
        help="tokens of an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="turns of each side (default: %(default)s)",
    )
    parser.add_argument(
        "--peer",
        metavar="COMMAND",
        help="command of another server, which replaces the engine alone",
    )
    parser.add_argument(
        "--peer-model", metavar="FILE", help="model of the other server (default: --model)"
    )
    return parser.parse_args()


_HEADINGS = [
    "",
    ">streams",
    ">tokens/s",
    ">to Headrace, HTTP",
    ">first token p50, ms",
    ">p99",
    ">between chunks p50, ms",
    ">p99",
    ">per token p50, ms",
    ">p99",
]


def main() -> None:
    args = parse_arguments()
    rows = [row for streams in args.streams for row in rows_of(args, streams)]
    title = f"{args.model}, prompts of about {args.prompt} tokens, answers of {args.output}"
    print_table(_HEADINGS, rows, title)


def rows_of(args: argparse.Namespace, streams: int) -> list[list[str]]:
    """The rows of one number of streams: a row for each side."""
    requests = bodies(streams * args.requests, args.prompt, args.output)
    sides: dict[str, list[Run]] = {}
    for _ in range(args.rounds):
        ours = over_http(args, streams, requests, peer="")
        sides.setdefault("Headrace, HTTP", []).append(ours)
        if args.peer:
            sides.setdefault("peer, HTTP", []).append(
                over_http(args, streams, requests, peer=args.peer)
            )
            continue
        for name, burn in (("engine alone, and a dummy", ours["cpu"]), ("engine alone", 0.0)):
            sides.setdefault(name, []).append(in_process(args, streams, requests, burn))

    base = [run["tokens"] / run["seconds"] for run in sides["Headrace, HTTP"]]
    rows = [row(name, streams, runs, base) for name, runs in sides.items()]
    client_cpu = statistics.median(run["cpu"] for run in sides["Headrace, HTTP"])
    rows[0][0] += f"; load {client_cpu:.0%} of a core"
    return rows


def over_http(args: argparse.Namespace, streams: int, requests: list[Run], peer: str) -> Run:
    """The requests against a new server: Headrace, or the command of a peer."""
    port = free_port()
    if peer:
        command = shlex.split(peer.format(model=args.peer_model or args.model, port=port))
    else:
        command = [sys.executable, "-m", "headrace", "serve", args.model]
        command += ["--port", str(port), "--max-model-len", str(max_model_len(args))]
    with server(command, port) as url:
        load(url, streams, requests[:streams])
        return load(url, streams, requests)


def in_process(args: argparse.Namespace, streams: int, requests: list[Run], burn: float) -> Run:
    """The requests in a new engine of this process, whose prefix cache is empty."""
    with AsyncLLM(args.model, max_model_len=max_model_len(args)) as llm:
        alone(llm, streams, requests[:streams], 0)
        return alone(llm, streams, requests, burn)


def max_model_len(args: argparse.Namespace) -> int:
    length: int = 4 * (args.prompt + args.output)
    return length


if __name__ == "__main__":
    main()
