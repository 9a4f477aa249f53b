"""Headrace against llama.cpp: the same GGUF file, the same number of threads, taking turns in one run.

Prefill of 512 tokens from an empty cache, and greedy decoding of 128 tokens at batch 1. Each round is a new process for
each engine, A B A B ..., so that a slow minute of the machine falls on both; within a process the median of a few
repetitions counts, and one more comes first to warm up. llama.cpp comes as llama-cpp-python in a virtual environment of
its own under .bench/ (building it takes minutes), or from `--peer PYTHON` where that has it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPT = [1000 + 7 * i for i in range(512)]
START = PROMPT[:8]
DECODED = 128
REPETITIONS = 3
FIGURES = {"decode": f"decode, batch 1, {DECODED} tokens", "prefill": f"prefill, {len(PROMPT)} tokens"}


def headrace(model: str, threads: int) -> dict[str, Callable[[], float]]:
    """Measurements of Headrace, in tokens per second."""
    from headrace import LLM, SamplingParams

    llm = LLM(model, threads=threads, max_model_len=1024)

    def prefill() -> float:
        (result,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0, max_tokens=1))
        return len(PROMPT) / result.timing.prefill

    def decode() -> float:
        params = SamplingParams(temperature=0, max_tokens=DECODED + 1, ignore_eos=True)
        (result,) = llm.generate([{"prompt_token_ids": START}], params)
        return DECODED / result.timing.decode

    return {"decode": decode, "prefill": prefill}


def llama_cpp(model: str, threads: int) -> dict[str, Callable[[], float]]:
    """Measurements of llama.cpp, in tokens per second."""
    import llama_cpp as peer
    import numpy as np

    llm = peer.Llama(model, n_ctx=1024, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def likeliest() -> int:
        return int(np.ctypeslib.as_array(peer.llama_get_logits(llm.ctx), shape=(llm.n_vocab(),)).argmax())

    def prefill() -> float:
        llm.reset()
        start = time.perf_counter()
        llm.eval(PROMPT)
        likeliest()
        return len(PROMPT) / (time.perf_counter() - start)

    def decode() -> float:
        llm.reset()
        llm.eval(START)
        token, start = likeliest(), time.perf_counter()
        for _ in range(DECODED):
            llm.eval([token])
            token = likeliest()
        return DECODED / (time.perf_counter() - start)

    return {"decode": decode, "prefill": prefill}


ENGINES = {"headrace": headrace, "llama.cpp": llama_cpp}


def work(engine: str, model: str, threads: int) -> None:
    """The inside of one process: prints its figures as JSON."""
    figures = ENGINES[engine](model, threads)
    found = {}
    for name, measure in figures.items():
        measure()
        found[name] = statistics.median(measure() for _ in range(REPETITIONS))
    print(json.dumps(found))


def peer_python() -> str:
    """The interpreter that has llama-cpp-python; set up on first use."""
    folder = ROOT / ".bench" / "llama.cpp"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print("setting up llama-cpp-python in .bench/ ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", "llama-cpp-python", "numpy"], check=True)
        (folder / "ready").touch()
    return str(python)


def measure(python: str, engine: str, model: str, threads: int) -> dict[str, float]:
    command = [python, "-P", __file__, "--worker", engine, "--model", model, "--threads", str(threads)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # -P: this file is no llama_cpp to import
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or what `headrace pull` makes one of")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--json", action="store_true", help="one JSON line for each round, before the table")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, args.model, args.threads)

    pull = [sys.executable, "-m", "headrace", "pull", args.model]
    model = subprocess.run(pull, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    pythons = {"headrace": sys.executable, "llama.cpp": args.peer or peer_python()}
    rounds = []
    for _ in range(args.rounds):
        rounds.append({engine: measure(python, engine, model, args.threads) for engine, python in pythons.items()})
        if args.json:
            print(json.dumps(rounds[-1]))
    report(Path(model).name, args.threads, rounds)


def report(model: str, threads: int, rounds: list[dict[str, dict[str, float]]]) -> None:
    print(f"{model}, {threads} threads, {len(rounds)} rounds, tokens/s: median (min-max), ratio of each round")
    print(f"{'':28}{'headrace':>22}{'llama.cpp':>22}{'ratio':>20}")
    for name, title in FIGURES.items():
        ours, theirs = ([r[engine][name] for r in rounds] for engine in ENGINES)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(f"{title:28}{spread(ours, 0):>22}{spread(theirs, 0):>22}{spread(ratios, 2):>20}")


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
