"""What scheduling costs without priorities: microseconds of a step, next to another checkout.

    python benchmarks/fifo.py --against CHECKOUT [--rounds 5]

CHECKOUT is a folder with another state of the code and its native module. Both run the same loads
with a tiny model, in turns, in processes of their own. A step counts with the fastest of its runs.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from headrace.engine.engine import Engine
from headrace.sampling_params import SamplingParams
from tests.tiny import tiny_engine, tiny_model

RUNS = 5
"""Runs of a load in one process."""
LOADS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "16 responses": (16, 0, {}),
    "64 wait for 16 places": (64, 0, {}),
    "64 wait for KV blocks": (64, 0, {"slots": 1600}),
    "one comes every 4 steps": (48, 4, {"max_num_seqs": 8}),
}
"""Number of requests, steps between two of them, options."""
Figures = dict[str, tuple[int, float, float]]
"""By load: steps, and microseconds of a step in `schedule` and in all."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="fifo.py", description=__doc__)
    parser.add_argument("--against", metavar="CHECKOUT", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    here = Path(__file__).parents[1]
    pairs = [(_in(args.against), _in(here)) for _ in range(args.rounds)]
    for name in LOADS:
        other, own = ([pair[side][name] for pair in pairs] for side in (0, 1))
        added = median(new[1] - old[1] for old, new in zip(other, own, strict=True))
        speeds = [old[2] / new[2] for old, new in zip(other, own, strict=True)]
        print(
            f"{name}: {other[0][0]} and {own[0][0]} steps; schedule "
            f"{median(old[1] for old in other):.1f} us and {added:+.1f} us a step; speed of a step "
            f"of {median(old[2] for old in other):.0f} us {median(speeds):.3f} "
            f"({min(speeds):.3f}-{max(speeds):.3f})"
        )


def _in(checkout: Path) -> Figures:
    env = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    script = str(Path(__file__).resolve())
    code = f"import runpy; runpy.run_path({script!r}, run_name='worker')['measure']()"
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        cwd=checkout,
        check=True,
        capture_output=True,
        text=True,
    )
    figures: Figures = json.loads(output.stdout)
    return figures


def measure() -> None:
    """Print the figures of the checkout that this process imports."""
    model = tiny_model(3, heads=2, kv_heads=1, ffn=32, context=1024)
    figures: Figures = {}
    for name, (number, gap, options) in LOADS.items():
        runs = []
        for _ in range(RUNS):
            engine = tiny_engine(model, "cpu", **{"slots": 16_000, "max_num_seqs": 16, **options})
            runs.append(list(_steps(engine, number, gap)))
            engine.close()
        fastest = [tuple(map(min, zip(*step, strict=True))) for step in zip(*runs, strict=True)]
        scheduling, total = (1e6 * sum(part) / len(fastest) for part in zip(*fastest, strict=True))
        figures[name] = len(fastest), scheduling, total
    print(json.dumps(figures))


def _steps(engine: Engine, number: int, gap: int) -> Iterator[tuple[float, float]]:
    """Seconds of each step: in `schedule`, and in all."""
    random_ = random.Random(7)
    left = [
        (
            [random_.randrange(61) for _ in range(random_.choice([4, 30, 120, 300]))],
            SamplingParams(seed=i, max_tokens=random_.choice([20, 60, 100]), ignore_eos=True),
        )
        for i in range(number)
    ]
    scheduler, spent = engine._scheduler, 0.0
    schedule = scheduler.schedule

    def timed() -> Any:
        nonlocal spent
        started = perf_counter()
        output = schedule()
        spent += perf_counter() - started
        return output

    scheduler.schedule = timed  # type: ignore[method-assign]
    step = 0
    while left or engine.has_work:
        while left and (not gap or step % gap == 0):
            engine.add_request(*left.pop(0))
            if gap:
                break
        spent, started = 0.0, perf_counter()
        engine.step()
        yield spent, perf_counter() - started
        step += 1


if __name__ == "__main__":
    main()
