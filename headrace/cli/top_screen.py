"""What `headrace top` shows of one record, and the line that it gives to each of several
engines.
"""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.backend_traits import BACKENDS
from headrace.cli.record import Record
from headrace.measure.table import printable
from headrace.stats import KvStats, Stats, ratio

_IDLE = 2.0
"""Seconds without a record after which an engine is called inactive."""
_SPARKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_STATES = {
    "decode": "green",
    "prefill": "cyan",
    "waiting": "dim",
    "preempted": "yellow",
    "padding": "magenta",
}


def screen(
    records: Sequence[Record], now: float, width: int = 100, rows: int = 40
) -> RenderableType:
    """All engines, and the first of them in full, with so many of its sequences, on so many
    columns.
    """
    parts: list[RenderableType] = [_engines(records, now)] if len(records) > 1 else []
    record = records[0]
    return Group(
        *parts, _head(record, now, width), _figures(record, width), _sequences(record, rows)
    )


def bar(share: float, width: int, *, warns: bool = False) -> Text:
    """A bar in eighths of a character; one that warns changes its colour from 80 % on."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    whole, rest = divmod(eighths, 8)
    filled = "█" * whole + (_EIGHTHS[rest] if rest else "")
    colour = "green" if share < 0.8 or not warns else "yellow" if share < 0.95 else "red"
    return Text.assemble(
        (filled, f"{colour} on grey23"), (" " * (width - len(filled)), "on grey23")
    )


def sparkline(values: Sequence[float]) -> str:
    """A character for each value, from nothing to the largest."""
    most = max(values, default=0.0)
    return "".join(
        _SPARKS[min(7, int(8 * value / most))] if most else _SPARKS[0] for value in values
    )


def duration(seconds: float) -> str:
    """`4.2 s`, `3:07` or `2:03:07`."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _engines(records: Sequence[Record], now: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("pid", "model", "tokens/s", "running", "waiting", "KV", "up"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for record in records:
        stats: Stats = record["stats"]
        speed = "inactive" if _is_inactive(record, now) else f"{stats.tokens_per_second:,.0f}"
        kv = f"{100 * stats.occupancy:.0f} %"
        cells = (
            str(record["pid"]),
            _model(record),
            speed,
            f"{stats.running:,}",
            f"{stats.waiting:,}",
            kv,
        )
        table.add_row(*map(Text, cells), duration(now - record["started"]))
    return table


def _head(record: Record, now: float, width: int) -> Panel:
    """Name and settings, and the speed of the last minute."""
    config, stats = record["config"], record["stats"]
    backend = config.get("backend")
    on_gpu = backend in BACKENDS and BACKENDS[backend].on_gpu
    words = [
        backend if on_gpu else f"{backend}, {config.get('threads')} threads",
        f"{config.get('kv_dtype')} KV",
    ]
    words += [] if config.get("batching") == "inflight" else [f"{config.get('batching')} batching"]
    words += [] if config.get("proposer") == "off" else [f"drafts: {config.get('proposer')}"]
    words += [
        f"context {config.get('max_model_len', 0):,}",
        f"up {duration(now - record['started'])}",
    ]
    title = Text.assemble(
        (_model(record), "bold"), f" · process {record['pid']} · ", printable(" · ".join(words))
    )
    inactive = _is_inactive(record, now)
    rate = stats.tokens_per_second
    speed = (
        f"inactive for {duration(now - record['time'])}"
        if inactive
        else f"{rate:,.{0 if rate >= 10 else 1}f} tokens/s"
    )
    grid = Table.grid(padding=(0, 2))
    history = record["history"][-min(60, max(10, width - 48)) :]
    line = Text.assemble((sparkline(history), "dim" if inactive else "green"))
    grid.add_row(
        Text(speed, "bold dim" if inactive else "bold green"),
        line,
        Text(f"last minute, at most {max(history, default=0):,.0f}", "dim"),
    )
    return Panel(grid, title=title, title_align="left", box=box.ROUNDED, border_style="grey50")


def _figures(record: Record, width: int) -> Table:
    stats, config = record["stats"], record["config"]
    max_num_seqs, most_rows = (
        config.get("max_num_seqs") or 1,
        config.get("max_num_batched_tokens") or 1,
    )
    grid = Table.grid(padding=(0, 2))
    wide = min(32, max(10, width - 70))
    for group in stats.kv:
        name = (
            "KV in use"
            if len(stats.kv) == 1
            else f"KV, {f'last {group.window:,}' if group.window else 'all tokens'}"
        )
        occupancy = group.blocks_used / group.blocks_total
        grid.add_row(
            name, bar(occupancy, wide, warns=True), f"{100 * occupancy:3.0f} %", _blocks(group)
        )
    queue = f"{stats.running:,} of {max_num_seqs:,} sequences; {stats.waiting:,} waiting"
    grid.add_row(
        "running",
        bar(stats.running / max_num_seqs, wide),
        f"{100 * stats.running / max_num_seqs:3.0f} %",
        queue,
    )
    step = (
        f"{stats.rows_last:,} of {most_rows:,} rows (mean {stats.rows_mean:,.1f}) in "
        f"{1000 * stats.step_seconds:,.1f} ms"
    )
    grid.add_row(
        "last step",
        bar(stats.rows_last / most_rows, wide),
        f"{100 * stats.rows_last / most_rows:3.0f} %",
        step,
    )
    hits = f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens had their KV already"
    grid.add_row(
        "prefix hits",
        bar(stats.prefix_hit_rate, wide),
        f"{100 * stats.prefix_hit_rate:3.0f} %",
        hits,
    )
    if stats.offloaded_blocks:
        words = f"{stats.offloaded_blocks:,} blocks went there, {stats.restored_blocks:,} came back"
        grid.add_row("host memory", "", "", f"{words}; {stats.kv_host_bytes / 1e6:,.0f} MB of KV")
    if stats.drafted:
        kept = f"{stats.accepted:,} of {stats.drafted:,} draft tokens accepted"
        grid.add_row(
            "drafts",
            bar(stats.acceptance_rate, wide),
            f"{100 * stats.acceptance_rate:3.0f} %",
            kept,
        )
    counts = {
        "finished": stats.finished,
        "aborted": stats.aborted,
        "refused": stats.refused,
        "preemptions": stats.preemptions,
    }
    done = f"{stats.tokens:,} tokens out; " + ", ".join(
        f"{value:,} {name}" for name, value in counts.items()
    )
    outer = Table.grid()
    outer.add_row(grid)
    outer.add_row(Text(f"so far       {done}", "dim"))
    return outer


def _blocks(group: KvStats) -> str:
    used = group.blocks_used * group.block_size
    words = (
        f"{group.blocks_used:,} of {group.blocks_total:,} blocks, "
        f"{used - group.slots_empty:,} tokens; "
    )
    cached = f"; {group.blocks_cached:,} free ones cached" if group.blocks_cached else ""
    return f"{words}{100 * ratio(group.slots_empty, used):.1f} % empty{cached}"


def _sequences(record: Record, rows: int) -> RenderableType:
    lines: list[dict[str, Any]] = record["seqs"]
    if not lines:
        return Text("")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("request", "state", "prompt", "cached", "output", "age"):
        table.add_column(name, justify="left" if name in ("request", "state") else "right")
    several = {line["request"] for line in lines if line["seq"]}
    for line in lines[:rows]:
        name = (
            f"{line['request']}.{line['seq']}"
            if line["request"] in several
            else str(line["request"])
        )
        state = str(line["state"])
        numbers = (f"{line[key]:,}" for key in ("prompt", "cached", "output"))
        table.add_row(
            Text(printable(name[:40])),
            Text(printable(state), _STATES.get(state, "")),
            *numbers,
            duration(line["age"]),
        )
    more = (
        len(lines) - rows + record["sequences_left_off"]
        if len(lines) > rows
        else record["sequences_left_off"]
    )
    return Group(table, Text(f"and {more:,} more", "dim")) if more else table


def _is_inactive(record: Record, now: float) -> bool:
    stats = record["stats"]
    return (now - record["time"] > _IDLE and not (stats.running or stats.waiting)) or now - record[
        "time"
    ] > 10 * _IDLE


def _model(record: Record) -> str:
    return printable(record["model"].rpartition("/")[2])[:40] or "engine"
