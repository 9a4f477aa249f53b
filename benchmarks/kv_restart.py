"""A long chat that goes on after `kill -9`: time to first token with and without `kv_cache_dir`.

    python benchmarks/kv_restart.py
    python benchmarks/kv_restart.py .bench/models/llama-1b-Q4_0.gguf --kv-dtype int8 --turns 1

A process computes a chat and is killed. Then processes take turns: one computes the chat, one
reads the folder from the page cache, one from the disk. Tokens and log-probabilities must be equal
to the bit. Each process is new, and its model is loaded before the clock starts. The last line has
the time that writing adds to computing.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams

TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of the chat")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="parent of the folder; it decides the disk")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(first_token(args, args.child)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with tempfile.TemporaryDirectory(dir=args.folder) as parent:
        folder = Path(parent) / "kv"
        written = child(folder)
        num_bytes = sum(file.stat().st_size for file in folder.rglob("*-*"))
        times: dict[str, list[float]] = {"computed": [], "read": [], "read from the disk": []}
        for turn in range(args.turns):
            for name, seconds in times.items():
                if name == "read from the disk":
                    drop_pages(folder.rglob("*-*"))
                found = child(Path() if name == "computed" else folder)
                for field in ("tokens", "logprobs"):
                    assert found[field] == written[field], f"{field} differ: {found} {written}"
                expected = 0 if name == "computed" else (args.tokens - 1) // 32 * 32
                assert found["cached"] == expected, found["cached"]
                seconds.append(found["seconds"])
                print(f"turn {turn + 1}: {name} {found['seconds']:.3f} s", file=sys.stderr)

    computed = statistics.median(times["computed"])
    print(f"{args.model}, {args.kv_dtype}: {args.tokens:,} tokens, {num_bytes / 1e6:,.0f} MB")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name}: {middle:.3f} s to the first token, 1/{computed / middle:.1f}")
    print(f"computed and written: {written['seconds']:.3f} s; dropped blocks: {written['dropped']}")


def child(folder: Path) -> dict[str, Any]:
    """Run this file in a process that kills itself, with a folder or, for `.`, without."""
    command = [sys.executable, *sys.argv, "--child", "" if folder == Path() else str(folder)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert run.returncode == -signal.SIGKILL, run.returncode
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def first_token(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Generate after the chat. Returns the seconds to the first token, and all tokens."""
    llm = LLM(
        args.model,
        backend="cpu",
        kv_dtype=args.kv_dtype,
        max_model_len=args.tokens + 64,
        max_num_seqs=2,
        multi_step_ms=0,
        kv_cache_dir=folder,
    )
    words = llm.get_tokenizer().encode(" The river turns the wheel, and the wheel turns the mill.")
    chat = [words[(i * i + i // 7) % len(words)] for i in range(args.tokens)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
    started, times, result = time.perf_counter(), list[float](), None
    for update in llm.stream({"prompt_token_ids": chat}, params):
        times.append(time.perf_counter() - started)
        result = update.result
    assert result
    time.sleep(0.5 if folder else 0)  # the last blocks are written
    output = result.outputs[0]
    return {
        "seconds": times[0],
        "cached": result.cached_tokens,
        "dropped": llm.stats().disk_dropped_blocks,
        "tokens": output.token_ids,
        "logprobs": [[[i, p.logprob] for i, p in each.items()] for each in output.logprobs or ()],
    }


def drop_pages(files: Iterable[Path]) -> None:
    """Drop files from the page cache, once they are on the disk."""
    os.sync()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    main()
