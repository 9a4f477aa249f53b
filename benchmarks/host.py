"""Host time of decode steps: the engine without a model, by number of sequences and phase.

    python benchmarks/host.py [--against CHECKOUT] [--rounds 5] [--cold]

The engine has its real scheduler, blocks, prefix cache and detokeniser, over an executable that
returns a token of a text for every op. `--cold` sweeps the caches in each launch, as weights do on
a CPU. CHECKOUT is a folder with another state of the code and its native module; both run in turns,
in processes of their own.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.backend import expert_table
from headrace.batch import Ints, RaggedBatch
from headrace.config import EngineConfig, KvConfig
from headrace.engine import multi_step, step
from headrace.engine.engine import Engine, EngineLimits
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Request
from headrace.loader.load import open_model
from headrace.logit_ops import Done, LogitOp, SampleResult, StepResult
from headrace.program.kv import KvGroup, KvLayout
from headrace.sampling_params import SamplingParams

SEQUENCES = (1, 8, 32, 64, 256)
PROMPT, STEPS = 40, 200
"""Tokens of a prompt, and measured steps of each sequence."""
_SWEPT_BYTES = 48 << 20
_TEXT = Path(__file__).with_name("README.md")
Figures = dict[str, dict[str, float]]
"""Microseconds of a step by number of sequences and phase."""


class NoModel:
    """Returns tokens of a text, without arithmetic."""

    max_in_flight = 1

    def __init__(self, tokens: list[int], is_cold: bool) -> None:
        self._results = [SampleResult([token], [], []) for token in tokens]
        self._swept = np.zeros(_SWEPT_BYTES // 8 if is_cold else 0)
        self._first = 0

    def launch(self, batch: RaggedBatch, ops: Sequence[LogitOp], **_: bool) -> Done:
        self._swept += 1.0
        first = self._first = (self._first + 7) % (len(self._results) - len(ops))
        return Done(StepResult(list(self._results[first : first + len(ops)])))

    def move_slots(self, group: int, source: Ints, target: Ints) -> None: ...

    def expert_loads(self) -> NDArray[np.int64]:
        return expert_table([])

    def close(self) -> None: ...


class Phases:
    """Seconds in some functions, by name of the phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, phase: str, owner: Any, name: str) -> None:
        """Time a function of a module or a class from now on."""
        if not hasattr(owner, name):  # in another state of the code
            return
        function: Callable[..., Any] = getattr(owner, name)
        self.seconds[phase] = 0.0

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[phase] += perf_counter() - start

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="host.py", description=__doc__)
    parser.add_argument("--against", metavar="CHECKOUT", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--multi-step-ms", type=float, default=0)
    args = parser.parse_args()
    here = Path(__file__).resolve().parents[1]
    checkouts = [args.against.resolve(), here] if args.against else [here]
    runs: list[list[Figures]] = [[] for _ in checkouts]
    for _ in range(args.rounds):
        for checkout, figures in zip(checkouts, runs, strict=True):
            figures.append(_in(checkout, args.cold, args.multi_step_ms))
    for number in runs[0][0]:
        for checkout, figures in zip(checkouts, runs, strict=True):
            of_number = [figure[number] for figure in figures]
            wholes = [figure["step"] for figure in of_number]
            phases = ", ".join(
                f"{name} {median(figure[name] for figure in of_number):.0f}"
                for name in of_number[0]
                if name != "step"
            )
            print(
                f"{number} sequences, {checkout.name}: {median(wholes):.0f} us a step "
                f"({min(wholes):.0f}-{max(wholes):.0f}), of which {phases}"
            )


def _in(checkout: Path, is_cold: bool, multi_step_ms: float) -> Figures:
    script = str(Path(__file__).resolve())
    code = (
        f"import runpy; runpy.run_path({script!r}, run_name='worker')['measure']"
        f"({is_cold}, {multi_step_ms})"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        cwd=checkout,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    figures: Figures = json.loads(output.stdout)
    return figures


def measure(is_cold: bool, multi_step_ms: float) -> None:
    """Print the figures of the checkout that this process imports."""
    whole = {number: _seconds(number, is_cold, multi_step_ms) for number in SEQUENCES}

    phases = Phases()
    phases.add("schedule", Scheduler, "schedule")
    phases.add("plan", multi_step.MultiStep, "plan")
    phases.add("batch", step, "build_batch")
    phases.add("ops", step, "prepare_logit_ops")
    phases.add("launch", NoModel, "launch")
    phases.add("resolve", step, "resolve_step")
    phases.add("commit", step.StepLoop, "_commit")
    phases.add("receive", step, "receive_tokens")
    phases.add("updates", Request, "new_updates")
    figures: Figures = {}
    for number in SEQUENCES:
        phases.seconds = dict.fromkeys(phases.seconds, 0.0)
        _seconds(number, is_cold, multi_step_ms, phases)
        parts = {name: 1e6 * seconds / STEPS for name, seconds in phases.seconds.items()}
        figures[str(number)] = {"step": 1e6 * whole[number] - parts.pop("launch")} | parts
    print(json.dumps(figures))


def _seconds(
    number: int, is_cold: bool, multi_step_ms: float, phases: Phases | None = None
) -> float:
    """Median seconds of a step with this number of decoding sequences."""
    engine = _engine(number, is_cold, multi_step_ms)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=STEPS + 40, ignore_eos=True)
    for request in range(number):
        engine.add_request([request + 100] * PROMPT, params)
    while engine.stats().rows_last != number or engine.stats().waiting:
        engine.step()
    for _ in range(10):
        engine.step()
    if phases:
        phases.seconds = dict.fromkeys(phases.seconds, 0.0)

    gc.collect()
    times: list[float] = []
    num_steps = 0
    while num_steps < STEPS:
        before = engine.stats().steps if multi_step_ms else 0
        start = perf_counter()
        engine.step()
        seconds = perf_counter() - start
        steps = engine.stats().steps - before if multi_step_ms else 1
        times.append(seconds / steps)
        num_steps += steps
    assert engine.stats().running == number
    engine.close()
    return median(times)


def _engine(number: int, is_cold: bool, multi_step_ms: float) -> Engine:
    tokenizer = open_model("smollm2", EngineConfig()).load_tokenizer()
    tokens = tokenizer.encode(_TEXT.read_text(), False, False)
    config = EngineConfig(
        max_num_seqs=number,
        max_num_batched_tokens=2048,
        chunked_prefill_size=0,
        multi_step_ms=multi_step_ms,
    )
    num_blocks = number * ((PROMPT + STEPS + 60) // 32 + 2)
    limits = EngineLimits(
        49152, 8192, KvConfig((num_blocks,), 32), (KvGroup((0,), KvLayout(1, 2, 2), 0, 0),)
    )
    return Engine(NoModel(tokens, is_cold), tokenizer, limits, config)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
