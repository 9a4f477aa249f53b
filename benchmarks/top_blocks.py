"""Attention to chosen blocks of KV (`attention_top_blocks`): speed at depth, loss on a long text.

    python benchmarks/top_blocks.py speed MODEL --depth 32768 --top-blocks 125,253
    python benchmarks/top_blocks.py loss MODEL --length 8192 --top-blocks 8,16,32,64

`speed` times decode steps of one sequence, dense and sparse in turn, over one KV cache that holds
copies of the KV of 2,048 random tokens. `loss` compares the next-token distributions of the last
half of a text with those of attention to all blocks.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[1]))

from headrace.backend import compile_program
from headrace.config import EngineConfig, KvConfig
from headrace.convert.quality import QualityMeter, Scorer
from headrace.convert.sequence_batch import num_blocks, sequence_batch
from headrace.convert.texts import read_text
from headrace.loader.backend_choice import with_kv_dtype
from headrace.loader.load import open_files
from headrace.loader.options import engine_config
from headrace.measure.table import print_table
from headrace.model import trace_model
from headrace.planner.host import usable_cores
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize

_FILLED, _CHUNK = 2048, 512


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "loss"))
    parser.add_argument("model")
    parser.add_argument("--top-blocks", default="32", help="numbers of chosen blocks")
    parser.add_argument("--depth", type=int, default=32_768, help="tokens of context")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--text", type=Path, help="text; default: Python's language reference")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the text")
    parser.add_argument("--kv-dtype", default="auto")
    args = parser.parse_args()
    counts = [int(count) for count in args.top_blocks.split(",")]
    config = engine_config({"kv_dtype": args.kv_dtype})
    if args.what == "speed":
        speed(args.model, config, counts, args.depth, args.rounds)
    else:
        loss(args.model, config, counts, args.text, args.length)


def speed(model: str, config: EngineConfig, counts: list[int], depth: int, rounds: int) -> None:
    checkpoint = open_files(model, config)
    config = with_kv_dtype(config, checkpoint)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    blocks, groups = num_blocks(depth), len(program.kv_groups)
    kv = KvConfig((blocks,) * groups, dtype=config.kv_format)
    dense = compile_program(
        "cpu", program.with_key_bounds(), checkpoint.tensors, kv, usable_cores()
    )
    executables = {0: dense}
    for count in counts:
        executables[count] = dense.attach(program.with_top_blocks(count), checkpoint.tensors)
    tokens = np.random.default_rng(0).integers(0, checkpoint.spec.vocab_size, depth).tolist()
    for first in range(0, _FILLED, _CHUNK):
        batch = sequence_batch(tokens, first, first + _CHUNK, 1, blocks, groups)
        dense.launch(batch).wait()
    slots = np.arange(depth, dtype=np.int32)
    for group in range(groups):
        dense.move_slots(group, slots[_FILLED:] % _FILLED, slots[_FILLED:])

    batch = sequence_batch(tokens, depth - 1, depth, 1, blocks, groups)
    seconds: dict[int, list[float]] = {count: [] for count in executables}
    attention: dict[int, list[float]] = {count: [] for count in executables}
    for turn in range(rounds + 1):
        for count, executable in executables.items():
            start = time.perf_counter()
            executable.launch(batch).wait()
            elapsed = time.perf_counter() - start
            times = executable.profile(batch)
            if turn:
                seconds[count].append(elapsed)
                attention[count].append(
                    times.ops["attention"] + times.ops.get("choose_blocks", 0.0)
                )
    step = StepSize(((depth - 1, 1),), 1, number_bytes(program.kv_groups, config.kv_format))
    rows = []
    for count, executable in executables.items():
        median = statistics.median(seconds[count])
        part = statistics.median(attention[count])
        bytes_read = sum(op.bytes(step) for op in executable.program.ops if op.name == "attention")
        ratio = statistics.median(a / b for a, b in zip(seconds[0], seconds[count], strict=True))
        part_ratio = statistics.median(
            a / b for a, b in zip(attention[0], attention[count], strict=True)
        )
        rows.append(
            [
                f"{count:,}" if count else "all",
                f"{bytes_read / 1e6:,.1f}",
                f"{1e3 * part:,.2f}",
                f"{part_ratio:.2f}",
                f"{1e3 * median:,.2f}",
                f"{ratio:.2f}",
            ]
        )
    headings = ["top blocks", ">MB", ">attention ms", ">faster", ">step ms", ">faster"]
    print_table(headings, rows, f"{checkpoint.spec.name}, {config.kv_format}, depth {depth:,}")


def loss(
    model: str, config: EngineConfig, counts: list[int], text: Path | None, length: int
) -> None:
    checkpoint = open_files(model, config)
    config = with_kv_dtype(config, checkpoint)
    tokenizer = checkpoint.load_tokenizer()
    words = read_text(text, "evaluation")
    ids = tokenizer.encode(words, add_special=False, parse_special=False)
    piece = [*tokenizer.prefix_ids, *ids][:length]
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    scorers = [
        Scorer(
            program.with_top_blocks(count),
            checkpoint.tensors,
            len(piece),
            "cpu",
            usable_cores(),
            config.kv_format,
        )
        for count in (0, *counts)
    ]
    meters = [QualityMeter() for _ in scorers]
    scores = [scorer.log_probabilities(piece) for scorer in scorers]
    for position, chunks in enumerate(zip(*scores, strict=True)):
        for meter, chunk in zip(meters, chunks, strict=True):
            add(meter, piece, 64 * position, chunk, chunks[0])
        if position % 16 == 0:
            print(f"{64 * position:,} of {len(piece):,} tokens", file=sys.stderr, flush=True)
    rows = []
    for count, meter in zip((0, *counts), meters, strict=True):
        quality = meter.quality()
        share = min(1.0, (count + 3) * 32 / (0.75 * len(piece))) if count else 1.0
        assert quality.kl is not None and quality.agreement is not None
        rows.append(
            [
                f"{count:,}" if count else "all",
                f"{100 * share:.0f} %",
                f"{quality.nll:.4f}",
                f"{quality.kl:.4f}",
                f"{quality.kl_99:.3f}",
                f"{100 * quality.agreement:.1f} %",
            ]
        )
    title = f"{checkpoint.spec.name}, {config.kv_format}: the last half of {len(piece):,} tokens"
    headings = ["top blocks", ">of the KV", ">NLL", ">KL", ">KL of 1 %", ">agreement"]
    print_table(headings, rows, title)


def add(
    meter: QualityMeter,
    piece: Sequence[int],
    first: int,
    chunk: NDArray[np.float32],
    reference: NDArray[np.float32],
) -> None:
    """Add the scores of a chunk in the last half of the piece."""
    if first < len(piece) // 2:
        return

    def one(rows: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        yield rows

    own = piece[first : first + len(chunk) + 1]
    if len(own) > 1:
        meter.add(own, one(chunk), one(reference))


if __name__ == "__main__":
    main()
