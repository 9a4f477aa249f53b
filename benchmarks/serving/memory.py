"""Memory of KV with long prompts: predicted, mapped and resident bytes.

It runs the default model at its full context, and a narrow random model with a prompt of 131,071
tokens. Mapped and predicted bytes must be equal. Resident bytes count touched pages (2 MB). Linux
only.
"""

import gc
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench import Ask, Bench, serve

from headrace.engine.engine import Engine
from headrace.measure.table import size
from headrace.model import trace_model
from headrace.program.kv import token_bytes
from tests.tiny import tiny_engine, tiny_model

PAGE = 2 << 20
"""Page size of the arena, which maps one page more for its alignment."""


class Mapping(NamedTuple):
    """Anonymous memory on huge pages."""

    nbytes: int
    resident: int


def mappings() -> dict[int, Mapping]:
    """Mappings by address. The kernel joins adjacent mappings of one kind."""
    found: dict[int, Mapping] = {}
    begin = nbytes = resident = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.p 0+ 00:00 0 *$", line):
            begin, nbytes = int(head[1], 16), int(head[2], 16) - int(head[1], 16)
        elif line.startswith("Rss:"):
            resident = 1024 * int(line.split()[1])
        elif line.startswith("VmFlags:") and begin:
            if "hg" in line.split():
                found[begin] = Mapping(nbytes, resident)
            begin = 0
    return found


def memory(bench: Bench) -> None:
    rows = []
    real = bench.engine(
        max_num_seqs=1, max_model_len=1024 if bench.quick else bench.prompt and bench.prompt + 1
    )
    rows.append(_row(bench.model, real, _bytes_per_token(bench.model)))
    tokens = 2048 if bench.quick else 131072
    model = tiny_model(0, dim=64, context=tokens + 1)
    narrow = tiny_engine(model, "cpu", slots=tokens, threads=bench.threads, max_num_seqs=1)
    rows.append(
        _row("random, width 64", narrow, token_bytes(trace_model(*model).kv_groups, "bf16"))
    )
    headings = ["model", ">prompt", ">predicted", ">mapped", ">resident", ">in use"]
    bench.table(
        "memory",
        "memory of KV, bytes: of the whole pool, and resident after the prompt",
        headings,
        rows,
    )


def _bytes_per_token(model: str) -> int:
    """The prediction of `headrace show`."""
    from headrace.measure.describe import describe

    facts = describe(model)
    return int(facts["kv_bytes_per_token"][facts["kv_dtype"]])


def _row(name: str, engine: Engine, per_token: int) -> tuple[dict[str, object], list[str]]:
    kv, (num_blocks,) = engine.limits.kv, engine.limits.kv.num_blocks
    predicted = num_blocks * kv.block_size * per_token
    arena = [
        address
        for address, found in mappings().items()
        if found.nbytes == -(-predicted // PAGE) * PAGE
    ]
    prompt_len = min(engine.limits.max_model_len - 1, num_blocks * kv.block_size)
    prompt = np.random.default_rng(0).integers(engine.limits.vocab_size, size=prompt_len).tolist()
    serve(engine, [Ask(prompt, 1)], name)
    after = mappings()
    mapped = after[arena[0]].nbytes if arena else 0
    resident = after[arena[0]].resident if arena else 0
    used = -(-prompt_len // kv.block_size) * kv.block_size * per_token
    engine.close()
    gc.collect()
    facts = {
        "model": name,
        "prompt": prompt_len,
        "predicted": predicted,
        "mapped": mapped,
        "resident": resident,
        "used": used,
    }
    return facts, [
        name,
        f"{prompt_len:,}",
        f"{predicted:,}",
        f"{mapped:,}",
        f"{resident:,} ({size(resident)})",
        f"{used:,}",
    ]
