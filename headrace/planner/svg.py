"""SVG elements. Colours follow the viewer's scheme, light or dark."""

import re
from collections.abc import Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

INK, FAINT, GRID = "#1f2933", "#5f6c7b", "#e8ecf0"
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#6b4fa0",
    "#8a6d3b",
    "#333333",
)
"""Colours for colour-blind readers, after Okabe and Ito 2008."""

_DARK = {
    INK: "#e6edf3",
    FAINT: "#9aa7b4",
    GRID: "#2d333b",
    "#ffffff": "#0d1117",
    "#f6f8fa": "#161b22",
    "#f7f7f7": "#161b22",
    "#c4ccd4": "#444c56",
    "#0072b2": "#4aa8e0",
    "#6b4fa0": "#a48be0",
    "#8a6d3b": "#c2a26a",
    "#333333": "#b0b8c0",
}
"""Colours that a dark scheme replaces; the others are light enough on black."""

_SIZE = re.compile(r'width="(\d+)" height="(\d+)"')


def document(title: str, width: int, height: int, body: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">',
        f"<title>{plain(title)}</title>",
        f"<style>{_dark_style()}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    )
    return "\n".join((*head, *body, "</svg>", ""))


def stack(title: str, documents: Sequence[str]) -> str:
    """A document with others below each other, as wide as the widest."""
    body, width, top = [], 0, 0
    for part in documents:
        match = _SIZE.search(part)
        assert match, "a document of this module"
        width = max(width, int(match[1]))
        body.append(part.replace("<svg ", f'<svg y="{top}" ', 1))
        top += int(match[2])
    return document(title, width, top, body)


def _dark_style() -> str:
    rules = (
        f'[{part}="{light}"]{{{part}:{dark}}}'
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"


def line(
    points: Iterable[tuple[float, float]], colour: str, width: float, opacity: float = 1.0
) -> str:
    fade = f' stroke-opacity="{opacity}"' if opacity < 1 else ""
    return (
        f'<polyline points="{pairs(points)}" fill="none" stroke="{colour}" '
        f'stroke-width="{width}"{fade}/>'
    )


def pairs(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "",
    fill: str = "",
    turn: float = 0.0,
    stroke: str = "",
) -> str:
    """`turn` rotates by degrees around the point."""
    extra = f' text-anchor="{anchor}"' if anchor != "start" else ""
    extra += f' font-size="{size}"' if size != 12 else ""
    extra += f' font-weight="{weight}"' if weight else ""
    extra += f' fill="{fill}"' if fill else ""
    extra += f' transform="rotate({turn:.1f} {x:.1f} {y:.1f})"' if turn else ""
    extra += f' stroke="{stroke}" stroke-width="3" stroke-linejoin="round"' if stroke else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{plain(text)}</text>'


def haloed(
    x: float,
    y: float,
    label: str,
    colour: str,
    *,
    weight: str = "",
    anchor: str = "start",
    turn: float = 0.0,
) -> Iterator[str]:
    yield text(
        x, y, label, weight=weight, anchor=anchor, turn=turn, fill="#ffffff", stroke="#ffffff"
    )
    yield text(x, y, label, weight=weight, anchor=anchor, turn=turn, fill=colour)


def plain(text: str) -> str:
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))
