"""The screen of `headrace top`: one engine in full, and a line for each of several engines."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.backend_traits import BACKENDS
from headrace.cli.engine_records import Record
from headrace.measure.table import printable
from headrace.planner.utilisation import MEASURED, StepUse
from headrace.stats import KvStats, Stats, ratio

NO_USES: Mapping[str, StepUse] = MappingProxyType({})
_INACTIVE_SECONDS = 2.0
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
    records: Sequence[Record],
    now: float,
    width: int = 100,
    rows: int = 40,
    uses: Mapping[str, StepUse] = NO_USES,
) -> RenderableType:
    """Show all engines in `width` columns, the first with at most `rows` sequences and with the
    use of the machine by its steps.
    """
    parts: list[RenderableType] = [_engines(records, now)] if len(records) > 1 else []
    record = records[0]
    return Group(
        *parts, _head(record, now, width), _figures(record, width, uses), _sequences(record, rows)
    )


def bar(share: float, width: int, *, warns: bool = False) -> Text:
    """A bar in eighths of a character; `warns` colours it from 80 % on."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    whole, rest = divmod(eighths, 8)
    filled = "█" * whole + (_EIGHTHS[rest] if rest else "")
    colour = "green" if share < 0.8 or not warns else "yellow" if share < 0.95 else "red"
    return Text.assemble(
        (filled, f"{colour} on grey23"), (" " * (width - len(filled)), "on grey23")
    )


def sparkline(values: Sequence[float]) -> str:
    largest = max(values, default=0.0)
    if not largest:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[min(7, int(8 * value / largest))] for value in values)


def duration(seconds: float) -> str:
    """`4.2 s`, `3:07` or `2:03:07`."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{whole_seconds:02}"
    return f"{minutes}:{whole_seconds:02}"


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
    stats, history = record["stats"], record["history"][-min(60, max(10, width - 48)) :]
    title = Text.assemble(
        (_model(record), "bold"),
        f" · process {record['pid']} · ",
        printable(" · ".join(_settings(record, now))),
    )
    inactive = _is_inactive(record, now)
    if inactive:
        speed = f"inactive for {duration(now - record['time'])}"
    else:
        rate = stats.tokens_per_second
        speed = f"{rate:,.{0 if rate >= 10 else 1}f} tokens/s"
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text(speed, "bold dim" if inactive else "bold green"),
        Text(sparkline(history), "dim" if inactive else "green"),
        Text(f"last minute, at most {max(history, default=0):,.0f}", "dim"),
    )
    return Panel(grid, title=title, title_align="left", box=box.ROUNDED, border_style="grey50")


def _settings(record: Record, now: float) -> list[str]:
    config = record["config"]
    backend, batching, proposer = (
        config.get("backend"),
        config.get("batching"),
        config.get("proposer"),
    )
    on_gpu = backend in BACKENDS and BACKENDS[backend].on_gpu
    settings = [
        backend if on_gpu else f"{backend}, {config.get('threads')} threads",
        f"{config.get('kv_dtype')} KV",
    ]
    if batching != "inflight":
        settings.append(f"{batching} batching")
    if proposer != "off":
        settings.append(f"drafts: {proposer}")
    if config.get("lossy"):
        settings.append(f"lossy: {config['lossy']}")
    settings.append(f"context {config.get('max_model_len', 0):,}")
    settings.append(f"up {duration(now - record['started'])}")
    return settings


def _figures(record: Record, width: int, uses: Mapping[str, StepUse]) -> Table:
    stats: Stats = record["stats"]
    config = record["config"]
    grid = Table.grid(padding=(0, 2))
    bar_width = min(32, max(10, width - 70))

    def add_share(name: str, share: float, text: str, *, warns: bool = False) -> None:
        grid.add_row(name, bar(share, bar_width, warns=warns), f"{100 * share:3.0f} %", text)

    for group in stats.kv:
        window = f"last {group.window:,}" if group.window else "all tokens"
        name = "KV in use" if len(stats.kv) == 1 else f"KV, {window}"
        add_share(name, group.blocks_used / group.blocks_total, _blocks(group), warns=True)
    max_num_seqs = config.get("max_num_seqs") or 1
    add_share(
        "running",
        stats.running / max_num_seqs,
        f"{stats.running:,} of {max_num_seqs:,} sequences; {stats.waiting:,} waiting",
    )
    max_rows = config.get("max_num_batched_tokens") or 1
    add_share(
        "last step",
        stats.rows_last / max_rows,
        f"{stats.rows_last:,} of {max_rows:,} rows (mean {stats.rows_mean:,.1f}) in "
        f"{1000 * stats.step_seconds:,.1f} ms",
    )
    for kind, use in uses.items():
        add_share(kind.removesuffix("_steps"), max(use.mbu[MEASURED], use.mfu[MEASURED]), _use(use))
    add_share(
        "prefix hits",
        stats.prefix_hit_rate,
        f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens were cached",
    )
    if stats.offloaded_blocks:
        text = (
            f"{stats.offloaded_blocks:,} blocks offloaded, {stats.restored_blocks:,} restored; "
            f"{stats.kv_host_bytes / 1e6:,.0f} MB of KV"
        )
        grid.add_row("host memory", "", "", text)
    if stats.kv_disk_bytes:
        text = (
            f"{stats.disk_saved_blocks:,} blocks written, {stats.disk_loaded_blocks:,} read; "
            f"{stats.kv_disk_bytes / 1e6:,.0f} MB in the folder"
        )
        grid.add_row("KV on disk", "", "", text)
    if stats.adapter_bytes:
        grid.add_row("adapters", "", "", f"{stats.adapter_bytes / 1e6:,.1f} MB")
    if stats.grammar_bytes:
        grid.add_row("grammars", "", "", f"{stats.grammar_bytes / 1e6:,.1f} MB of states")
    if stats.drafted:
        text = f"{stats.accepted:,} of {stats.drafted:,} draft tokens accepted"
        add_share("drafts", stats.acceptance_rate, text)

    total = (
        f"total        {stats.tokens:,} tokens out; {stats.finished:,} finished, "
        f"{stats.aborted:,} aborted, {stats.refused:,} refused, {stats.preemptions:,} preemptions"
    )
    outer = Table.grid()
    outer.add_row(grid)
    outer.add_row(Text(total, "dim"))
    return outer


def _use(use: StepUse) -> str:
    shares = [
        f"{name} {' / '.join(f'{100 * share:.0f}' for share in by_roof.values())} %"
        for name, by_roof in (("MBU", use.mbu), ("MFU", use.mfu))
    ]
    text = f"{', '.join(shares)}; {1000 * use.seconds:,.2f} ms a step"
    if use.predicted is None or use.error is None:
        return text
    return f"{text}, predicted {1000 * use.predicted:,.2f} ({100 * use.error:+.0f} %)"


def _blocks(group: KvStats) -> str:
    slots = group.blocks_used * group.block_size
    text = (
        f"{group.blocks_used:,} of {group.blocks_total:,} blocks, "
        f"{slots - group.slots_empty:,} tokens; {100 * ratio(group.slots_empty, slots):.1f} % empty"
    )
    return f"{text}; {group.blocks_cached:,} free ones cached" if group.blocks_cached else text


def _sequences(record: Record, rows: int) -> RenderableType:
    lines: list[dict[str, Any]] = record["seqs"]
    if not lines:
        return Text("")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("request", "state", "prompt", "cached", "output", "age"):
        table.add_column(name, justify="left" if name in ("request", "state") else "right")
    forked = {line["request"] for line in lines if line["seq"]}
    for line in lines[:rows]:
        name = str(line["request"])
        if line["request"] in forked:
            name = f"{name}.{line['seq']}"
        state = str(line["state"])
        numbers = (f"{line[key]:,}" for key in ("prompt", "cached", "output"))
        table.add_row(
            Text(printable(name[:40])),
            Text(printable(state), _STATES.get(state, "")),
            *numbers,
            duration(line["age"]),
        )
    num_hidden = max(0, len(lines) - rows) + record["sequences_left_off"]
    return Group(table, Text(f"and {num_hidden:,} more", "dim")) if num_hidden else table


def _is_inactive(record: Record, now: float) -> bool:
    stats, age = record["stats"], now - record["time"]
    has_requests = stats.running or stats.waiting
    return bool(age > 10 * _INACTIVE_SECONDS or (age > _INACTIVE_SECONDS and not has_requests))


def _model(record: Record) -> str:
    return printable(record["model"].rpartition("/")[2])[:40] or "engine"
