"""SVG picture of the keys that have most of the weight: a row of cells for each layer.

Colour is the logarithm of the share of keys, on a fixed scale.
"""

from collections.abc import Iterator
from math import log10

from headrace.measure.attention_profile import AttentionProfile, HeadAttention, by_layer
from headrace.planner.svg import COLOURS, FAINT, GRID, document, line, text

_LEFT, _RIGHT, _TOP, _WIDTH = 76, 870, 84, 1000
_FEW, _MANY = "#f9ede4", COLOURS[1]
_SHARE = 1
"""Index in `SHARES` of the weight that is drawn: 99 %."""
_DECADES = 3.0
_SCALE_HEIGHT, _SCALE_STEPS = 150, 40
_LABELS = {"all": 0.0, "1 in 10": -1.0, "1 in 100": -2.0, "1 in 1,000": -3.0}


def attention_map_svg(title: str, profile: AttentionProfile) -> str:
    """Draw the share of keys with 99 % of the weight, [layers, heads], as an SVG document."""
    layers = by_layer(profile)
    num_heads = max(map(len, layers.values()))
    width, height = (_RIGHT - _LEFT) / num_heads, min(48.0, max(12.0, 420 / len(layers)))
    bottom = _TOP + len(layers) * height
    body = [
        text(_LEFT, 34, title, size=18, weight="bold"),
        text(_LEFT, 56, _subtitle(profile), fill=FAINT),
        *_cells(list(layers.values()), profile.context, width, height),
        *_frame(list(layers), num_heads, width, height, bottom),
        *_legend(),
    ]
    return document(title, _WIDTH, round(max(bottom + 56, _TOP + _SCALE_HEIGHT + 60)), body)


def _subtitle(profile: AttentionProfile) -> str:
    keys = sorted(head.keys[_SHARE] for head in profile.heads)
    return (
        f"keys with 99 % of the weight, of {profile.context:,.0f} in the mean: "
        f"{keys[0]:,.0f} to {keys[-1]:,.0f}, median {keys[len(keys) // 2]:,.0f}; "
        f"{profile.rows:,} rows of a text of {profile.tokens:,} tokens"
    )


def _cells(
    layers: list[list[HeadAttention]], context: float, width: float, height: float
) -> Iterator[str]:
    gap = min(1.0, width / 8)
    for row, heads in enumerate(layers):
        for head in heads:
            x, y, keys = _LEFT + head.head * width, _TOP + row * height, head.keys[_SHARE]
            box = f'x="{x:.1f}" y="{y:.1f}" width="{width - gap:.1f}" height="{height - gap:.1f}"'
            label = (
                f"<title>layer {head.layer}, head {head.head}: {keys:,.0f} keys have 99 % of the "
                f"weight; {100 * head.zero_keys:.1f} % of the weights are 0</title>"
            )
            colour = _colour(1 + log10(keys / context) / _DECADES)
            yield f'<rect class="head" {box} fill="{colour}">{label}</rect>'


def _colour(part: float) -> str:
    """The colour at `part` of the scale, 0 to 1."""
    part = min(1.0, max(0.0, part))
    pairs = ((int(_FEW[i : i + 2], 16), int(_MANY[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + part * (y - x)):02x}" for x, y in pairs)


def _frame(
    layers: list[int], num_heads: int, width: float, height: float, bottom: float
) -> Iterator[str]:
    yield line([(_LEFT, _TOP), (_LEFT, bottom), (_RIGHT, bottom)], GRID, 1)
    for row in range(0, len(layers), _label_stride(height, 15)):
        y = _TOP + (row + 0.5) * height + 4
        yield text(_LEFT - 8, y, f"{layers[row]:,}", anchor="end")
    for head in range(0, num_heads, _label_stride(width, 30)):
        yield text(_LEFT + (head + 0.5) * width, bottom + 18, f"{head:,}", anchor="middle")
    yield text((_LEFT + _RIGHT) / 2, bottom + 42, "query head", anchor="middle", size=13)
    yield text(24, (_TOP + bottom) / 2, "layer", anchor="middle", size=13, turn=-90)


def _label_stride(size: float, min_distance: float) -> int:
    stride = 1
    while stride * size < min_distance:
        stride *= 2
    return stride


def _legend() -> Iterator[str]:
    x, step_height = _RIGHT + 20, _SCALE_HEIGHT / _SCALE_STEPS
    yield text(x, _TOP + 8, "Share of", weight="bold")
    yield text(x, _TOP + 23, "the keys", weight="bold")
    top = _TOP + 36
    for i in range(_SCALE_STEPS):
        colour = _colour(1 - (i + 0.5) / _SCALE_STEPS)
        yield (
            f'<rect x="{x}" y="{top + i * step_height:.1f}" width="14" '
            f'height="{step_height + 0.5:.1f}" fill="{colour}"/>'
        )
    for label, decades in _LABELS.items():
        yield text(x + 22, top - _SCALE_HEIGHT * decades / _DECADES + 4, label)
