"""Watch the engines that run on this machine: KV memory, rows, speed and requests, live in the
terminal.

Nothing has to be prepared: every engine of yours (headrace run, LLM(...), a benchmark) shows up
while it works. With one engine, or with a PID, its requests are shown too. Engines in a container
are seen where the folder HEADRACE_STATS is shared.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import add_json, whole_number
from headrace.cli.output_file import check_writable, write
from headrace.cli.signals import go_on_after
from headrace.cli.terminal import is_dumb
from headrace.errors import HeadraceError, RequestError

if TYPE_CHECKING:
    from headrace.cli.watching import Watch
    from headrace.stats import BlockMap

_NOBODY = "none of your engines is running; an engine shows up here while it computes"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    parser.add_argument(
        "which",
        metavar="PID",
        nargs="?",
        type=whole_number(1, 2**31 - 1),
        help="the process to show, where several have an engine",
    )
    parser.add_argument("--once", action="store_true", help="print what there is now, and end")
    parser.add_argument(
        "--map",
        type=Path,
        metavar="FILE",
        help="draw which request holds which block of KV, as SVG, and end",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show until Ctrl-C; with --once, --json, --map or without a terminal that can be redrawn, only
    what is there now.
    """
    from headrace.cli.watching import Watch, facts
    from headrace.measure.table import print_json

    if args.map:
        check_writable("--map", args.map)
    watch = Watch(args.which, with_map=args.map is not None)
    if args.map:
        return _draw(watch, args.map)
    if args.json:
        print_json([facts(record) for record in watch.wait()])
        return 0
    if args.once or not sys.stdout.isatty() or is_dumb():
        return _print(watch)
    try:
        _live(watch)
    except KeyboardInterrupt as interrupt:  # how one leaves
        go_on_after(interrupt)
    return 0


def _print(watch: "Watch") -> int:
    from rich.console import Console

    from headrace.cli.top_screen import screen

    records = watch.wait()
    if not records:
        raise HeadraceError(_NOBODY)
    console = Console()
    console.print(screen(records, watch.now(), console.width))
    return 0


def _live(watch: "Watch") -> None:
    """Redraw twice a second."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from headrace.cli.top_screen import screen

    def view() -> Any:
        records = watch.read()
        rows = max(4, console.height - 18)
        return (
            screen(records, watch.now(), console.width, rows)
            if records
            else Text(f"{_NOBODY} (Ctrl-C ends this)", "dim")
        )

    console = Console()
    with Live(view(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            watch.sleep()
            live.update(view(), refresh=True)


def _draw(watch: "Watch", path: Path) -> int:
    from headrace.planner.block_picture import block_map_svg

    records = watch.wait()
    if not records:
        raise HeadraceError(_NOBODY)
    record = max(records, key=lambda record: record["time"])
    blocks: BlockMap | None = record.get("map")
    if blocks is None:
        raise RequestError(f"the KV pool of process {record['pid']} has too many blocks to draw")
    svg = block_map_svg(
        f"{record['model']}, process {record['pid']}: which request holds which block of KV", blocks
    )
    write("--map", path, svg)
    print(f"The block map of process {record['pid']} is drawn in {path}.")
    return 0
