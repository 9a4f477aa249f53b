"""SVG pictures of layers and columns: a row of coloured cells for each layer, and a scale."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from headrace.planner.svg import FAINT, GRID, document, line, text
from headrace.record import frozen

_LEFT, _RIGHT, _TOP, _WIDTH = 76, 870, 84, 1000
_SCALE_HEIGHT, _SCALE_STEPS = 150, 40


class Cell(NamedTuple):
    level: float
    """Place on the scale, from 0 to 1."""
    title: str
    """Text that a browser shows with the cell."""


@frozen(kw_only=True)
class HeatMap:
    """A picture of a number for each layer and column."""

    title: str
    subtitle: str
    layers: Sequence[int]
    """Number of each row."""
    cells: Sequence[Sequence[Cell]]  # [layers, columns]
    columns: str
    """What a column is, below the picture."""
    kind: str
    """Class of a cell in the document."""
    scale: tuple[str, str]
    """Title of the scale in two lines."""
    labels: Mapping[str, float]
    """Levels on the scale, by label."""
    colour: Callable[[float], str]
    """Colour of a level."""

    def svg(self) -> str:
        num_columns = max(map(len, self.cells))
        width = (_RIGHT - _LEFT) / num_columns
        height = min(48.0, max(12.0, 420 / len(self.layers)))
        bottom = _TOP + len(self.layers) * height
        body = [
            text(_LEFT, 34, self.title, size=18, weight="bold"),
            text(_LEFT, 56, self.subtitle, fill=FAINT),
            *self._cells(width, height),
            *self._frame(num_columns, width, height, bottom),
            *self._scale(),
        ]
        whole = round(max(bottom + 56, _TOP + _SCALE_HEIGHT + 60))
        return document(self.title, _WIDTH, whole, body)

    def _cells(self, width: float, height: float) -> list[str]:
        gap = min(1.0, width / 8)
        size = f'width="{width - gap:.1f}" height="{height - gap:.1f}"'
        return [
            f'<rect class="{self.kind}" x="{_LEFT + column * width:.1f}" '
            f'y="{_TOP + row * height:.1f}" {size} fill="{self.colour(cell.level)}">'
            f"<title>{cell.title}</title></rect>"
            for row, cells in enumerate(self.cells)
            for column, cell in enumerate(cells)
        ]

    def _frame(self, num_columns: int, width: float, height: float, bottom: float) -> list[str]:
        rows = range(0, len(self.layers), _stride(height, 15))
        columns = range(0, num_columns, _stride(width, 30))
        return [
            line([(_LEFT, _TOP), (_LEFT, bottom), (_RIGHT, bottom)], GRID, 1),
            *(
                text(
                    _LEFT - 8,
                    _TOP + (row + 0.5) * height + 4,
                    f"{self.layers[row]:,}",
                    anchor="end",
                )
                for row in rows
            ),
            *(
                text(_LEFT + (column + 0.5) * width, bottom + 18, f"{column:,}", anchor="middle")
                for column in columns
            ),
            text((_LEFT + _RIGHT) / 2, bottom + 42, self.columns, anchor="middle", size=13),
            text(24, (_TOP + bottom) / 2, "layer", anchor="middle", size=13, turn=-90),
        ]

    def _scale(self) -> list[str]:
        x, top, step = _RIGHT + 20, _TOP + 36, _SCALE_HEIGHT / _SCALE_STEPS
        return [
            text(x, _TOP + 8, self.scale[0], weight="bold"),
            text(x, _TOP + 23, self.scale[1], weight="bold"),
            *(
                f'<rect x="{x}" y="{top + i * step:.1f}" width="14" height="{step + 0.5:.1f}" '
                f'fill="{self.colour(1 - (i + 0.5) / _SCALE_STEPS)}"/>'
                for i in range(_SCALE_STEPS)
            ),
            *(
                text(x + 22, top + _SCALE_HEIGHT * (1 - level) + 4, label)
                for label, level in self.labels.items()
            ),
        ]


def blend(start: str, end: str, part: float) -> str:
    """The colour at `part` of the way from `start` to `end`, limited to 0 to 1."""
    part = min(1.0, max(0.0, part))
    pairs = ((int(start[i : i + 2], 16), int(end[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + part * (y - x)):02x}" for x, y in pairs)


def _stride(size: float, min_distance: float) -> int:
    stride = 1
    while stride * size < min_distance:
        stride *= 2
    return stride
