"""A drafter that learns while it serves: a shift of topic, a restart, poison, memory and speed.

    headrace distil draft smollm2 smollm2-draft
    python benchmarks/online_drafts.py smollm2 smollm2-draft --json online.jsonl

The topic is SQL. Each round serves four requests, then pauses, as the training needs idle time.
Acceptance is that of greedy chains of four drafts on requests that no round serves. The poison are
random tokens, continued at a high temperature. The last part compares the speed with and without
learning, in turns, without pauses. The training has the lowest priority, so it gets no time on a
machine with other work; with --foreground it has a normal one. A pause ends after new weights, or
after a number of slices, so its length in seconds does not change the results.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace import LLM, SamplingParams
from headrace.speculation.learning import trainer_process
from headrace.stats import LearningStats

_TABLES = (
    *("customers", "orders", "books", "flights", "players", "recipes", "songs", "invoices"),
    *("patients", "hotels", "movies", "sensors", "employees", "tickets", "cars", "loans"),
)
_MEASURED = 16
_TASKS = (
    "counts the rows of the table {} by month",
    "lists the ten newest rows of the table {}",
    "finds duplicates in the table {}",
    "joins the table {} with a table of countries",
    "deletes rows of the table {} that are older than a year",
    "adds an index to the table {} and explains why",
    "computes a moving average over the table {}",
    "makes the table {} with five columns",
)
_ASK = "Write an SQL statement that {}. Explain each line."
_OPTIONS: dict[str, Any] = {
    "proposer": "draft_model",
    "adaptive_speculation": False,
    "max_num_seqs": 4,
    "max_model_len": 1024,
    "kv_blocks": 256,
}


_IN_FOREGROUND = "from headrace.distil.online import main; main(in_background=False)"


class Report:
    """Prints lines, and writes them as JSON."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, part: str, **figures: Any) -> None:
        words = ", ".join(f"{name} {_shown(value)}" for name, value in figures.items())
        print(f"{part}: {words}", flush=True)
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps({"part": part} | figures) + "\n")


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def prompts() -> tuple[list[str], list[str]]:
    """Return the requests to serve, and those to measure with, in an order that is fixed."""
    every = [_ASK.format(task.format(table)) for table in _TABLES for task in _TASKS]
    order = np.random.default_rng(0).permutation(len(every))
    shuffled = [every[i] for i in order]
    return shuffled[_MEASURED:], shuffled[:_MEASURED]


def chat(llm: LLM, texts: Sequence[str], max_tokens: int) -> int:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    results = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    return sum(len(result.outputs[0].token_ids) for result in results)


def poison(llm: LLM, rng: np.random.Generator, max_tokens: int) -> None:
    """Continue random tokens at a temperature that makes every token likely."""
    params = SamplingParams(temperature=3.0, max_tokens=max_tokens, ignore_eos=True)
    texts: Any = [
        {"prompt_token_ids": rng.integers(100, llm.spec.vocab_size, 16).tolist()} for _ in range(4)
    ]
    llm.generate(texts, params)


def acceptance(model: str, drafter: str, texts: Sequence[str], max_tokens: int) -> float:
    """Return the tokens of a step with the weights in a folder."""
    with LLM(model, **_OPTIONS, draft_model=drafter) as llm:
        chat(llm, texts, max_tokens)
        drafts = llm.stats().drafts["draft_model"]
    return 1 + drafts.accepted / max(1, drafts.steps)


def memory_mb(pid: int | str) -> float:
    """Return the memory of a process without files, in MB."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0.0
    return int(text.split("RssAnon:")[1].split()[0]) / 1000


def settle(llm: LLM, slices: int, seconds: float) -> None:
    """Wait until new weights arrive, or for some slices of training, or for some seconds."""
    before, deadline = llm.stats().learning, time.monotonic() + seconds
    while time.monotonic() < deadline:
        now = llm.stats().learning
        if now.swaps > before.swaps or now.slices >= before.slices + slices:
            return
        time.sleep(0.1)


def figures(learning: LearningStats) -> dict[str, Any]:
    return {
        "tokens": learning.tokens,
        "trained": learning.trained_tokens,
        "slices": learning.slices,
        "swaps": learning.swaps,
        "rollbacks": learning.rollbacks,
        "first_draft_before": learning.acceptance_before,
        "first_draft": learning.acceptance,
    }


def shift_of_topic(args: argparse.Namespace, home: Path, report: Report) -> None:
    served, measured = prompts()
    before = acceptance(args.model, args.drafter, measured, args.tokens)
    report.add("before", tokens_per_step=before)
    with LLM(args.model, **_OPTIONS, draft_model=args.drafter, learn_drafts=str(home)) as llm:
        for number in range(args.rounds):
            first = 4 * number % len(served)
            chat(llm, served[first : first + 4], args.tokens)
            settle(llm, args.slices, args.pause)
            learning = llm.stats().learning
            learner = llm._engine.learner
            trainer = memory_mb(learner.trainer_pid or 0) if learner else 0.0
            memory = {"engine_mb": memory_mb("self"), "trainer_mb": trainer}
            report.add("round", number=number, **figures(learning), **memory)
    if not (home / "model.safetensors").exists():
        report.add("after", tokens_per_step=before, learned=False)
        return
    after = acceptance(args.model, str(home), measured, args.tokens)
    report.add("after a restart", tokens_per_step=after, gain=after / before)


def poisoned(args: argparse.Namespace, home: Path, report: Report) -> None:
    """Serve random text with the learned weights; no worse weights may stay."""
    _, measured = prompts()
    start = str(home) if (home / "model.safetensors").exists() else args.drafter
    before = acceptance(args.model, start, measured, args.tokens)
    rng = np.random.default_rng(1)
    with LLM(args.model, **_OPTIONS, draft_model=args.drafter, learn_drafts=str(home)) as llm:
        for _ in range(args.rounds // 2):
            poison(llm, rng, args.tokens)
            settle(llm, args.slices, args.pause)
        chat(llm, measured, args.tokens)  # acceptance on real text decides on the last weights
        report.add("poison", **figures(llm.stats().learning))
    start = str(home) if (home / "model.safetensors").exists() else args.drafter
    after = acceptance(args.model, start, measured, args.tokens)
    report.add("after poison", tokens_per_step=after, of_before=after / before)


def speed(args: argparse.Namespace, report: Report) -> None:
    """Serve without pauses, with and without learning, in turns.

    The CPU time of this process, which has both engines, is that of the engines' own work: with
    one thread it hardly depends on other work of the machine.
    """
    served, _ = prompts()
    options = _OPTIONS | {"draft_model": args.drafter, "adaptive_speculation": True}
    speeds, cpu_times = list[float](), list[float]()
    with LLM(args.model, **options) as plain, LLM(args.model, **options, learn_drafts="on") as llm:
        for turn in range(args.turns + 1):
            found = {}
            for each in (plain, llm) if turn % 2 else (llm, plain):
                begun, cpu_begun = time.perf_counter(), time.process_time()
                num_tokens = sum(chat(each, [text], args.tokens) for text in served[:4])
                seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu_begun
                found[each is llm] = num_tokens / seconds, cpu / num_tokens
            if turn:  # the first turn warms up
                speeds.append(found[True][0] / found[False][0])
                cpu_times.append(found[True][1] / found[False][1])
    report.add("speed with learning / without", median=statistics.median(speeds), turns=speeds)
    report.add("CPU time of it", median=statistics.median(cpu_times), turns=cpu_times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("drafter", help="folder of an EAGLE-3 drafter of the model")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=250, help="maximum tokens of an output")
    parser.add_argument("--slices", type=int, default=160, help="slices of training after a round")
    parser.add_argument("--pause", type=float, default=60.0, help="maximum seconds after a round")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--foreground", action="store_true", help="train at normal priority")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--parts", default="shift,poison,speed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("headrace.learning").setLevel(logging.INFO)
    if args.foreground:
        trainer_process.COMMAND = (sys.executable, "-c", _IN_FOREGROUND)
    _OPTIONS["threads"] = args.threads
    report, parts = Report(args.json), args.parts.split(",")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "learned"
        if "shift" in parts:
            shift_of_topic(args, home, report)
        if "poison" in parts:
            poisoned(args, home, report)
        if "speed" in parts:
            speed(args, report)


if __name__ == "__main__":
    main()
