"""Published speeds of other engines (`published.toml`) next to predictions by the planner.

    python benchmarks/published.py            # the table, and medians of both halves
    python benchmarks/published.py --fit      # choose the shares of each engine again
    python benchmarks/published.py --write    # write docs/internals/plan-published.md

Each figure is predicted twice: with the shares of roofs that our kernels reach, and with an
engine's own shares (`published_shares.toml`). Rows with odd numbers choose an engine's shares.
Rows with even numbers are held out.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace.backend import lower_program
from headrace.checkpoint.dummy import dummy_tensors, open_dummy_checkpoint
from headrace.measure.place import find_place
from headrace.measure.table import print_table
from headrace.model import trace_model
from headrace.parallel.mesh import Mesh, weights_of
from headrace.planner.hardware import Machine
from headrace.planner.reach import Reach, Reaches, known_reaches
from headrace.planner.step_time import Link, StepTimer
from headrace.program.kv import number_bytes
from headrace.program.op import StepSize
from headrace.program.trace import Program
from headrace.quant.formats import FORMATS

FOLDER = Path(__file__).parent
LIST, SHARES = FOLDER / "published.toml", FOLDER / "published_shares.toml"
PAGE = FOLDER.parent / "docs/internals/plan-published.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"
TITLE = "Errors of predictions; rows with * are held out"
MAX_SEQS = 2048
PREFILL_TOKENS = 8192
"""Prompt tokens of one step in a run of many requests."""
MEMORY_SHARE = 0.9
"""Share of a device's memory that weights and KV take in a run."""


class Row(NamedTuple):
    number: int
    engine: str
    machine: str
    devices: int
    model: str
    format: str
    kind: str
    batch: int
    depth: int
    prompt: int
    output: int
    published: float

    @property
    def is_held_out(self) -> bool:
        return self.number % 2 == 0

    @property
    def kv_dtype(self) -> str:
        return "fp8" if (self.engine, self.format) == ("TensorRT-LLM", "Q8_0") else "bf16"

    @property
    def work(self) -> str:
        match self.kind:
            case "decode" | "step":
                return f"{self.batch:,} x 1 at {self.middle:,}"
            case "prompt":
                return f"{self.prompt:,} by {self.batch:,} at {self.depth:,}"
            case "first":
                return f"first of {self.prompt:,}"
            case _:
                return f"{self.batch or 'full'} x {self.prompt:,} + {self.output:,}"

    @property
    def middle(self) -> int:
        """Tokens of context half way through the output."""
        return self.depth + self.prompt + self.output // 2


class Shares(NamedTuple):
    """What an engine's kernels reach: seconds of a call and of an exchange, shares of bandwidth
    and of the bf16 rate by bits of a weight, and both for attention.
    """

    call: float = 4e-6
    exchange: float = 8e-6
    read16: float = 0.9
    read8: float = 0.8
    read4: float = 0.7
    rate16: float = 0.6
    rate8: float = 0.5
    rate4: float = 0.4
    attention_read: float = 0.7
    attention_rate: float = 0.25

    @property
    def reaches(self) -> Reaches:
        linear = {
            16.0: self._reach(self.read16, self.rate16),
            8.0: self._reach(self.read8, self.rate8),
            4.0: self._reach(self.read4, self.rate4),
        }
        attention = {16.0: self._reach(self.attention_read, self.attention_rate)}
        rows = {32.0: self._reach(0.85, 0.5)}
        return Reaches(
            source="published figures with odd numbers",
            table={"linear": linear, "qkv": linear, "attention": attention, "rows": rows},
        )

    def _reach(self, bandwidth: float, rate: float) -> Reach:
        return Reach(seconds=self.call, bandwidth=bandwidth, rate=rate)


def read_rows() -> list[Row]:
    numbers = iter(range(1, 10**6))
    return [
        Row(next(numbers), source["engine"], *row)
        for source in _list()["source"]
        for row in source["rows"]
    ]


@cache
def _list() -> dict[str, Any]:
    return tomllib.loads(LIST.read_text())


def read_shares() -> dict[str, Shares]:
    return {name: Shares(**entry) for name, entry in tomllib.loads(SHARES.read_text()).items()}


@cache
def program_of(model: str, format: str, devices: int) -> Program:
    """A device's program, lowered for a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(_list()["models"][model] | {"torch_dtype": "bfloat16"}))
        spec = open_dummy_checkpoint(file).spec
    tensors, mesh = dummy_tensors(spec, FORMATS[format]), Mesh(tensor=devices)
    share = mesh.program(trace_model(spec, tensors), 0)
    return lower_program("cuda", share, weights_of(share, tensors))


@cache
def device_of(machine: str, devices: int) -> tuple[Machine, int, Link | None]:
    """Roofs, bytes of memory, and link of a machine file or of a GPU that only the list has."""
    if entry := _list()["machines"].get(machine):
        rates = {kind: entry["rate"] for kind in ("int8", "bf16", "f32")}
        roofs = Machine(entry["title"], "metal", 1, entry["bandwidth"], rates)  # type: ignore[arg-type]
        return roofs, 0, None
    place = find_place(machine, Mesh(tensor=devices))
    return place.machine, place.memory, place.link


def predict(row: Row, shares: Shares | None = None) -> float:
    """The published figure of a row, predicted with an engine's shares, or with ours."""
    program = program_of(row.model, row.format, row.devices)
    machine, memory, link = device_of(row.machine, row.devices)
    reaches = shares.reaches if shares else known_reaches("cuda")
    assert reaches
    if shares and link:
        link = Link(link.bandwidth, shares.exchange)
    timer = StepTimer([program], machine, reaches, link)
    kv_bytes = number_bytes(program.kv_groups, row.kv_dtype)  # type: ignore[arg-type]
    batch = row.batch or _fitting(row, program, memory)

    def decode(depth: int) -> float:
        return timer.seconds(StepSize(((depth, 1),) * batch, batch, kv_bytes))

    match row.kind:
        case "decode":
            return batch / decode(row.middle)
        case "step":
            return 1e3 * decode(row.middle)
        case "prompt":
            steps = [
                StepSize(((row.depth + start, min(batch, row.prompt - start)),), 1, kv_bytes)
                for start in range(0, row.prompt, batch)
            ]
            return row.prompt / sum(map(timer.seconds, steps))
        case "first":
            return 1e3 * timer.seconds(StepSize(((0, row.prompt),), 1, kv_bytes))
    together = max(1, PREFILL_TOKENS // row.prompt)
    prefill = timer.seconds(StepSize(((0, row.prompt),) * together, together, kv_bytes))
    seconds = batch / together * prefill + row.output * decode(row.middle)
    return batch * row.output / seconds / row.devices


def _fitting(row: Row, program: Program, memory: int) -> int:
    """Requests whose KV fits next to the weights, half way through their outputs."""
    token = sum(group.block_bytes(row.kv_dtype, 1) for group in program.kv_groups)  # type: ignore[arg-type]
    budget = MEMORY_SHARE * memory - program.weight_bytes
    return min(MAX_SEQS, int(budget / (token * row.middle)))


def fit(rows: Sequence[Row]) -> Shares:
    """Choose an engine's shares: one after the other moves, as long as errors of `rows` fall."""
    start = best = Shares()
    # Our programs multiply 8-bit weights in bf16; FP8 has twice its rate.
    limits = {"call": (0.3e-6, 60e-6), "exchange": (1e-6, 60e-6), "rate8": (0.03, 2.0)}

    def loss(shares: Shares) -> float:
        errors = sum(abs(math.log(predict(row, shares) / row.published)) for row in rows)
        # A weak pull to the start settles what no row decides.
        return errors + 0.02 * sum(abs(math.log(a / b)) for a, b in zip(shares, start, strict=True))

    least, moved = loss(best), True
    while moved:
        moved = False
        for field in Shares._fields:
            low, high = limits.get(field, (0.03, 1.0))
            for factor in (0.6, 0.8, 0.9, 0.97, 1.03, 1.1, 1.25, 1.6):
                value = min(high, max(low, getattr(best, field) * factor))
                tried = best._replace(**{field: value})
                if (now := loss(tried)) < least - 1e-6:
                    best, least, moved = tried, now, True
    return best


def choose(rows: Sequence[Row]) -> None:
    """Write the shares of each engine, chosen with the rows that are not held out."""
    lines = [
        "# Shares of roofs that peers' kernels reach, by `python benchmarks/published.py --fit`.",
        "# Chosen from published figures with odd numbers in published.toml, not measured by us.",
    ]
    for engine in dict.fromkeys(row.engine for row in rows):
        chosen = fit([row for row in rows if row.engine == engine and not row.is_held_out])
        lines += ["", f'["{engine}"]']
        lines += [f"{field} = {value:.3g}" for field, value in chosen._asdict().items()]
    SHARES.write_text("\n".join(lines) + "\n")


def error(row: Row, shares: Shares | None = None) -> float:
    return predict(row, shares) / row.published - 1


HEADS = ["row", "engine", "machine", "model", "work", "published", "our kernels", "its kernels"]


def table(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each row, with the errors of both predictions."""
    shares = read_shares()
    return [
        [
            f"{row.number}{'*' if row.is_held_out else ''}",
            row.engine,
            f"{row.devices} x {row.machine}" if row.devices > 1 else row.machine,
            f"{row.model} {row.format}",
            row.work,
            f"{row.published:,.5g}{' ms' if row.kind in ('first', 'step') else ''}",
            f"{error(row):+.0%}",
            f"{error(row, shares[row.engine]):+.0%}",
        ]
        for row in rows
    ]


def medians(rows: Sequence[Row]) -> list[list[str]]:
    """Median errors of both halves, and of the half that is held out by engine."""
    shares = read_shares()
    groups = {
        "chosen from": [row for row in rows if not row.is_held_out],
        "held out": [row for row in rows if row.is_held_out],
    }
    for engine in shares:
        groups[f"held out: {engine}"] = [row for row in groups["held out"] if row.engine == engine]

    def median(group: Sequence[Row], own: bool) -> str:
        sizes = [abs(error(row, None if own else shares[row.engine])) for row in group]
        return f"{statistics.median(sizes):.0%}"

    return [
        [name, str(len(group)), median(group, True), median(group, False)]
        for name, group in groups.items()
    ]


MEDIAN_HEADS = ["rows", "count", "our kernels", "its kernels"]


def markdown(rows: Sequence[Row]) -> str:
    tables = [(MEDIAN_HEADS, medians(rows)), (HEADS, table(rows))]
    return "\n".join("\n".join(_lines(heads, lines)) + "\n" for heads, lines in tables)


def _lines(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    marks = ["---"] * (len(heads) - 3) + ["---:"] * 3
    return [f"| {' | '.join(cells)} |" for cells in (heads, marks, *lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fit", action="store_true", help="choice of the engines' shares")
    parser.add_argument(
        "--write", action="store_true", help="write docs/internals/plan-published.md"
    )
    args, rows = parser.parse_args(), read_rows()
    if args.fit:
        choose(rows)
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + markdown(rows) + END + rest.partition(END)[2])
        return
    print_table([*HEADS[:5], *(f">{head}" for head in HEADS[5:])], table(rows), TITLE)
    print()
    print_table(["rows", *(f">{head}" for head in MEDIAN_HEADS[1:])], medians(rows), "Median error")


if __name__ == "__main__":
    main()
