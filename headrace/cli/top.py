"""Watch the engines that run on this machine: KV memory, rows, speed and requests.

Every engine of this user (headrace run, LLM(...), a benchmark) appears while it computes, without
preparation. A single engine, or the engine of PID, is shown with its requests. Engines in a
container appear if the folder HEADRACE_STATS is shared with it.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import add_json, whole_number
from headrace.cli.output_file import check_writable, write
from headrace.cli.signals import resume_after
from headrace.cli.terminal import is_dumb
from headrace.errors import HeadraceError, RequestError

if TYPE_CHECKING:
    from headrace.cli.engine_records import EngineWatcher, Record
    from headrace.cli.top_use import UseReader
    from headrace.stats import BlockMap

EXAMPLES = """\
  headrace top
  headrace top 4711 --once
  headrace top --map blocks.svg"""

_NO_ENGINE = "no engine of yours is running; an engine appears while it computes"
_LINES_ABOVE_SEQUENCES = 18


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pid",
        metavar="PID",
        nargs="?",
        type=whole_number(1, 2**31 - 1),
        help="id of the process to watch, if several have an engine",
    )
    parser.add_argument("--once", action="store_true", help="one screen, without updates")
    parser.add_argument(
        "--map",
        type=Path,
        metavar="FILE",
        help="SVG file for a picture of the KV blocks and of the requests that hold them",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from headrace.cli.engine_records import EngineWatcher, record_facts
    from headrace.cli.top_use import UseReader
    from headrace.measure.table import print_json

    if args.map:
        check_writable("--map", args.map)
    watcher = EngineWatcher(args.pid, with_map=args.map is not None)
    if args.map:
        return _draw_map(watcher, args.map)
    if args.json:
        reader = UseReader()
        print_json([record_facts(record) | _uses(reader, record) for record in watcher.wait()])
        return 0
    if args.once or not sys.stdout.isatty() or is_dumb():
        return _print_once(watcher)
    try:
        _update_screen(watcher)
    except KeyboardInterrupt as interrupt:  # the usual way to leave
        resume_after(interrupt)
    return 0


def _uses(reader: "UseReader", record: "Record") -> dict[str, Any]:
    return {"uses": {kind: use.facts() for kind, use in reader.read(record).items()}}


def _print_once(watcher: "EngineWatcher") -> int:
    from rich.console import Console

    from headrace.cli.top_screen import screen
    from headrace.cli.top_use import UseReader

    records = watcher.wait()
    if not records:
        raise HeadraceError(_NO_ENGINE)
    console = Console()
    uses = UseReader().read(records[0])
    console.print(screen(records, watcher.now(), console.width, uses=uses))
    return 0


def _update_screen(watcher: "EngineWatcher") -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from headrace.cli.top_screen import screen
    from headrace.cli.top_use import UseReader

    console, reader = Console(), UseReader()

    def view() -> Any:
        records = watcher.read()
        if not records:
            return Text(f"{_NO_ENGINE} (Ctrl-C to leave)", "dim")
        rows = max(4, console.height - _LINES_ABOVE_SEQUENCES)
        uses = reader.read(records[0])
        return screen(records, watcher.now(), console.width, rows, uses)

    with Live(view(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            watcher.sleep()
            live.update(view(), refresh=True)


def _draw_map(watcher: "EngineWatcher", path: Path) -> int:
    from headrace.planner.block_picture import block_map_svg

    records = watcher.wait()
    if not records:
        raise HeadraceError(_NO_ENGINE)
    record = max(records, key=lambda record: record["time"])
    block_map: BlockMap | None = record.get("map")
    if block_map is None:
        raise RequestError(f"the KV pool of process {record['pid']} has too many blocks to draw")
    title = f"{record['model']}, process {record['pid']}: KV blocks by request"
    write("--map", path, block_map_svg(title, block_map))
    print(f"The block map of process {record['pid']} is drawn in {path}.")
    return 0
