"""SVG picture of the rows of each expert: a row of cells for each layer.

Colour is the logarithm of the rows over the mean, on a fixed scale.
"""

from collections.abc import Iterator, Sequence
from math import log2

from headrace.planner.svg import COLOURS, FAINT, GRID, document, line, text

_LEFT, _RIGHT, _TOP, _WIDTH = 76, 870, 84, 1000
_PALE, _MORE, _FEWER = "#f7f7f7", COLOURS[1], COLOURS[0]
_SCALE_LABELS = {"4 or more": 2.0, "2": 1.0, "1": 0.0, "1/2": -1.0, "1/4 or fewer": -2.0}
"""Binary logarithms by label."""
_SCALE_HEIGHT, _SCALE_STEPS = 150, 40


def expert_map_svg(title: str, loads: Sequence[Sequence[int]]) -> str:
    """Draw [layers of experts, experts] as an SVG document. An expert must have a row."""
    num_layers, num_experts = len(loads), max(map(len, loads))
    mean = sum(map(sum, loads)) / (num_layers * num_experts)
    width, height = (_RIGHT - _LEFT) / num_experts, min(48.0, max(12.0, 420 / num_layers))
    bottom = _TOP + num_layers * height
    body = [
        text(_LEFT, 34, title, size=18, weight="bold"),
        text(_LEFT, 56, _subtitle(loads, mean), fill=FAINT),
        *_cells(loads, mean, width, height),
        *_frame(num_layers, num_experts, width, height, bottom),
        *_legend(),
    ]
    return document(title, _WIDTH, round(max(bottom + 56, _TOP + _SCALE_HEIGHT + 60)), body)


def _subtitle(loads: Sequence[Sequence[int]], mean: float) -> str:
    shares = [load / mean for layer_loads in loads for load in layer_loads]
    layers = f"{len(loads):,} layer" + "s" * (len(loads) > 1)
    unused = f"; {shares.count(0):,} had none" if 0 in shares else ""
    return (
        f"{layers} of {max(map(len, loads)):,} experts, {mean:,.1f} rows each in the mean; the "
        f"busiest had {max(shares):.1f} times the mean, the least busy {min(shares):.2f}{unused}"
    )


def _cells(
    loads: Sequence[Sequence[int]], mean: float, width: float, height: float
) -> Iterator[str]:
    gap = min(1.0, width / 8)
    for layer, layer_loads in enumerate(loads):
        for expert, load in enumerate(layer_loads):
            x, y, share = _LEFT + expert * width, _TOP + layer * height, load / mean
            box = f'x="{x:.1f}" y="{y:.1f}" width="{width - gap:.1f}" height="{height - gap:.1f}"'
            label = (
                f"<title>layer {layer}, expert {expert}: {load:,} rows, {share:.2f} times the "
                "mean</title>"
            )
            colour = _colour(log2(share) if load else -2.0)
            yield f'<rect class="expert" {box} fill="{colour}">{label}</rect>'


def _colour(octaves: float) -> str:
    end = _MORE if octaves > 0 else _FEWER
    part = min(abs(octaves) / 2, 1.0)
    pairs = ((int(_PALE[i : i + 2], 16), int(end[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + part * (y - x)):02x}" for x, y in pairs)


def _frame(
    num_layers: int, num_experts: int, width: float, height: float, bottom: float
) -> Iterator[str]:
    yield line([(_LEFT, _TOP), (_LEFT, bottom), (_RIGHT, bottom)], GRID, 1)
    for layer in range(0, num_layers, _label_stride(height, 15)):
        yield text(_LEFT - 8, _TOP + (layer + 0.5) * height + 4, f"{layer:,}", anchor="end")
    for expert in range(0, num_experts, _label_stride(width, 30)):
        yield text(_LEFT + (expert + 0.5) * width, bottom + 18, f"{expert:,}", anchor="middle")
    yield text((_LEFT + _RIGHT) / 2, bottom + 42, "expert", anchor="middle", size=13)
    yield text(24, (_TOP + bottom) / 2, "layer", anchor="middle", size=13, turn=-90)


def _label_stride(size: float, min_distance: float) -> int:
    stride = 1
    while stride * size < min_distance:
        stride *= 2
    return stride


def _legend() -> Iterator[str]:
    x, step_height = _RIGHT + 20, _SCALE_HEIGHT / _SCALE_STEPS
    yield text(x, _TOP + 8, "Times the", weight="bold")
    yield text(x, _TOP + 23, "mean", weight="bold")
    top = _TOP + 36
    for i in range(_SCALE_STEPS):
        colour = _colour(2 - 4 * (i + 0.5) / _SCALE_STEPS)
        yield (
            f'<rect x="{x}" y="{top + i * step_height:.1f}" width="14" '
            f'height="{step_height + 0.5:.1f}" fill="{colour}"/>'
        )
    for label, octaves in _SCALE_LABELS.items():
        yield text(x + 22, top + _SCALE_HEIGHT * (2 - octaves) / 4 + 4, label)
