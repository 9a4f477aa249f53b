"""In-flight and static batching with the same requests, max sequences and kernels, in turns.

All requests arrive at the start. Both sides must give the same tokens, otherwise the run is not
timed. Static batching pads short prompts with slots, but not with rows (headrace/engine/static.py),
which is cheaper than in real servers.
"""

import numpy as np
from bench import Bench, Served, serve, spread
from workload import WORDS, trace

MAX_NUM_SEQS = 32
TARGET = 2.5


def batching(bench: Bench) -> None:
    engines = {
        name: bench.engine(batching=name, max_num_seqs=MAX_NUM_SEQS, max_model_len=2048)
        for name in ("inflight", "static")
    }
    asks = trace(engines["inflight"].limits.vocab_size, bench.num_requests)
    runs: dict[str, list[Served]] = {name: [] for name in engines}
    for engine in engines.values():
        serve(engine, asks[:2], "warming up")
    for turn in range(bench.rounds):
        for name, engine in engines.items():
            runs[name].append(serve(engine, asks, f"round {turn + 1} of {bench.rounds}, {name}"))
    if runs["inflight"][0].outputs != runs["static"][0].outputs:
        raise SystemExit("the two sides gave different tokens")
    for engine in engines.values():
        engine.close()
    tokens = sum(ask.num_tokens for ask in asks)
    rows = [_row(name, served, tokens) for name, served in runs.items()]
    headings = ["batching", ">output tokens/s", ">mean latency, s", ">p50", ">p95", ">memory waste"]
    bench.table(
        "batching",
        f"{len(asks)} requests at once, at most {MAX_NUM_SEQS} running sequences; {WORDS}",
        headings,
        rows,
    )
    ratios = [
        static.seconds / inflight.seconds
        for inflight, static in zip(runs["inflight"], runs["static"], strict=True)
    ]
    verdict = "" if np.median(ratios) >= TARGET else ", missed"
    facts = {"ratio": ratios, "target": TARGET}
    bench.table(
        "batching_ratio",
        "throughput of in-flight to static",
        [">ratio", "target"],
        [(facts, [spread(ratios, ".2f"), f">= {TARGET}{verdict}"])],
    )


def _row(name: str, runs: list[Served], tokens: int) -> tuple[dict[str, object], list[str]]:
    speeds = [tokens / run.seconds for run in runs]
    latencies = {"mean": [float(np.mean(run.latencies)) for run in runs]}
    latencies |= {
        f"p{p}": [float(np.percentile(run.latencies, p)) for run in runs] for p in (50, 95)
    }
    wasted = [run.waste for run in runs]
    cells = [
        name,
        spread(speeds, ",.0f"),
        *(spread(values, ",.1f") for values in latencies.values()),
        f"{100 * np.median(wasted):.1f} %",
    ]
    return {
        "batching": name,
        "tokens_per_second": speeds,
        "latency": latencies,
        "waste": wasted,
    }, cells
