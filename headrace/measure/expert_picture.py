"""SVG picture of the rows of each expert: a row of cells for each layer.

Colour is the logarithm of the rows over the mean, on a fixed scale.
"""

from collections.abc import Sequence
from math import log2

from headrace.measure.heat_map import Cell, HeatMap, blend
from headrace.planner.svg import COLOURS

_PALE, _MORE, _FEWER = "#f7f7f7", COLOURS[1], COLOURS[0]
_LABELS = {"4 or more": 1.0, "2": 0.75, "1": 0.5, "1/2": 0.25, "1/4 or fewer": 0.0}


def expert_map_svg(title: str, loads: Sequence[Sequence[int]]) -> str:
    """Draw [layers of experts, experts] as an SVG document. An expert must have a row."""
    mean = sum(map(sum, loads)) / (len(loads) * max(map(len, loads)))

    def cell(layer: int, expert: int, load: int) -> Cell:
        share = load / mean
        label = f"layer {layer}, expert {expert}: {load:,} rows, {share:.2f} times the mean"
        return Cell(min(1.0, max(0.0, (log2(share) + 2) / 4)) if load else 0.0, label)

    return HeatMap(
        title=title,
        subtitle=_subtitle(loads, mean),
        layers=range(len(loads)),
        cells=[
            [cell(layer, expert, load) for expert, load in enumerate(layer_loads)]
            for layer, layer_loads in enumerate(loads)
        ],
        columns="expert",
        kind="expert",
        scale=("Times the", "mean"),
        labels=_LABELS,
        colour=_colour,
    ).svg()


def _subtitle(loads: Sequence[Sequence[int]], mean: float) -> str:
    shares = [load / mean for layer_loads in loads for load in layer_loads]
    layers = f"{len(loads):,} layer" + "s" * (len(loads) > 1)
    unused = f"; {shares.count(0):,} had none" if 0 in shares else ""
    return (
        f"{layers} of {max(map(len, loads)):,} experts, {mean:,.1f} rows each in the mean; the "
        f"busiest had {max(shares):.1f} times the mean, the least busy {min(shares):.2f}{unused}"
    )


def _colour(level: float) -> str:
    """Pale at the mean, in the middle of the scale."""
    return blend(_PALE, _MORE if level > 0.5 else _FEWER, abs(2 * level - 1))
