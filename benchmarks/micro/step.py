"""What a step costs beside the native plan: scheduling, building, drawing, committing, emitting.

Every branch decodes one row in every step. The plan is timed from outside; the rest of `Engine.step` is what is shown, in
microseconds, median (quarter-three quarters of the steps), of the whole step and of each branch. Most of it at one branch is
the price of memory: a plan that has read all weights leaves nothing of Python in the caches.
"""

import argparse
import statistics
import time
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.llm import load_engine
from headrace.request import SamplingParams

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


class TimedPlan:
    """A native plan that adds up the seconds of its runs."""

    def __init__(self, plan: Any) -> None:
        self.seconds = 0.0
        self._plan = plan

    def run(self, *arguments: Any) -> None:
        start = time.perf_counter()
        self._plan.run(*arguments)
        self.seconds += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


def measure(engine: Engine, plan: TimedPlan, params: SamplingParams, branches: int, prompt: list[int]) -> tuple[list[float], list[float]]:
    """Quartiles over the calls in which all branches decode: microseconds of a step in the plan, and beside it."""
    for _ in range(branches):
        engine.add_request(prompt, params)
    inside, beside = [], []
    while engine.has_work:
        before, steps, start = plan.seconds, engine._stepper.num_steps, time.perf_counter()
        updates = engine.step()
        called, run, steps = time.perf_counter() - start, plan.seconds - before, engine._stepper.num_steps - steps
        if len(updates) == branches:
            inside.append(run * 1e6 / steps)
            beside.append((called - run) * 1e6 / steps)
    return statistics.quantiles(inside[1:], n=4), statistics.quantiles(beside[1:], n=4)  # the first step was the prompt's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ahead-ms", type=float, default=EngineConfig.ahead_ms, help="how long steps run in a row")
    parser.add_argument("--branches", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    engine, tokenizer, _ = load_engine(args.model, EngineConfig(threads=args.threads, max_model_len=1024, ahead_ms=args.ahead_ms))
    executable: Any = engine._stepper.executable
    executable.plan = plan = TimedPlan(executable.plan)
    prompt = tokenizer.encode("A water wheel turns because")
    print(f"{'':28}{'branches':>9}{'plan':>9}{'beside it':>22}{'a branch':>10}{'share':>8}")
    for name, options in CASES.items():
        for branches in args.branches:
            params = SamplingParams(max_tokens=args.steps, ignore_eos=True, **options)
            (_, inside, _), (low, beside, high) = measure(engine, plan, params, branches, prompt)
            spread = f"{beside:,.0f} ({low:,.0f}-{high:,.0f})"
            print(f"{name:28}{branches:9}{inside:9,.0f}{spread:>22}{beside / branches:10.1f}{beside / inside:8.1%}")


if __name__ == "__main__":
    main()
