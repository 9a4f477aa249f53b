"""The table of `peers.py` in Markdown: medians, spreads and ratios."""

from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

OURS = "headrace"


class Figure(NamedTuple):
    """One figure of one engine in one round."""

    round: int
    engine: str
    name: str
    value: float
    less_is_better: bool


def table(title: str, engines: Iterable[str], figures: list[Figure]) -> str:
    """A line for each figure, a column for each engine, and the ratio by round to the peer with the
    best median.
    """
    engines = list(engines)
    lines = [[title, *engines, f"{OURS} / best peer"]]
    for name in dict.fromkeys(figure.name for figure in figures):
        mine = [figure for figure in figures if figure.name == name]
        found = {e: {f.round: f.value for f in mine if f.engine == e} for e in engines}
        cells = [_spread(list(found[engine].values())) for engine in engines]
        lines.append(
            [
                name + ", less is better" * mine[0].less_is_better,
                *cells,
                _ratio(found, mine[0].less_is_better),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    ]
    return "\n".join([rows[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *rows[1:]])


def _ratio(found: Mapping[str, Mapping[int, float]], less_is_better: bool) -> str:
    peers = {
        engine: median(values.values())
        for engine, values in found.items()
        if engine != OURS and values
    }
    if not peers or not found.get(OURS):
        return "-"
    best = (min if less_is_better else max)(peers, key=lambda engine: peers[engine])
    ratios = [
        value / found[best][turn] for turn, value in found[OURS].items() if turn in found[best]
    ]
    return f"{_spread(ratios)}, {best}" if ratios else "-"


def _spread(values: list[float]) -> str:
    return (
        f"{_number(median(values))} ({_number(min(values))}-{_number(max(values))})"
        if values
        else "-"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
