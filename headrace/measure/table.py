import json
import os
import sys
from collections.abc import Mapping, Sequence


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table. A heading that starts with `>` aligns its column to the right."""
    right = [heading.startswith(">") for heading in headings]
    names = [heading.removeprefix(">") for heading in headings]
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        _print_rich(names, right, rows, title)
        return

    lines = [names, *rows] if any(names) else list(rows)
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(names))]
    if title:
        print(title)
    for line in lines:
        cells = (
            cell.rjust(width) if flush_right else cell.ljust(width)
            for cell, width, flush_right in zip(line, widths, right, strict=True)
        )
        print("  ".join(cells).rstrip())


def _print_rich(
    names: Sequence[str], right: Sequence[bool], rows: Sequence[Sequence[str]], title: str
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, show_header=any(names), collapse_padding=True, pad_edge=False
    )
    if title:
        table.title, table.title_justify, table.title_style = Text(title), "left", "bold"
    for name, flush_right in zip(names, right, strict=True):
        table.add_column(name, justify="right" if flush_right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def print_figures(title: str, figures: Mapping[str, str]) -> None:
    print_table(["", ""], list(figures.items()), printable(title))
    print()


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def printable(text: str) -> str:
    """Replace control characters, because names from untrusted files could steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def size(num_bytes: float) -> str:
    """Bytes as `98.1 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.{0 if unit == 'B' else 1}f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
