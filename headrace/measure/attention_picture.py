"""SVG picture of the keys that have most of the weight: a row of cells for each layer.

Colour is the logarithm of the share of keys, on a fixed scale.
"""

from math import log10

from headrace.measure.attention_profile import AttentionProfile, HeadAttention, by_layer
from headrace.measure.heat_map import Cell, HeatMap, blend
from headrace.planner.svg import COLOURS

_FEW, _MANY = "#f9ede4", COLOURS[1]
_SHARE = 1
"""Index in `SHARES` of the weight that is drawn: 99 %."""
_DECADES = 3
_LABELS = {"all": 1.0, "1 in 10": 2 / 3, "1 in 100": 1 / 3, "1 in 1,000": 0.0}


def attention_map_svg(title: str, profile: AttentionProfile) -> str:
    """Draw the share of keys with 99 % of the weight, [layers, heads], as an SVG document."""
    layers = by_layer(profile)

    def cell(head: HeadAttention) -> Cell:
        keys = head.keys[_SHARE]
        label = (
            f"layer {head.layer}, head {head.head}: {keys:,.0f} keys have 99 % of the weight; "
            f"{100 * head.zero_keys:.1f} % of the weights are 0"
        )
        return Cell(1 + log10(keys / profile.context) / _DECADES, label)

    return HeatMap(
        title=title,
        subtitle=_subtitle(profile),
        layers=list(layers),
        cells=[list(map(cell, heads)) for heads in layers.values()],
        columns="query head",
        kind="head",
        scale=("Share of", "the keys"),
        labels=_LABELS,
        colour=lambda level: blend(_FEW, _MANY, level),
    ).svg()


def _subtitle(profile: AttentionProfile) -> str:
    keys = sorted(head.keys[_SHARE] for head in profile.heads)
    return (
        f"keys with 99 % of the weight, of {profile.context:,.0f} in the mean: "
        f"{keys[0]:,.0f} to {keys[-1]:,.0f}, median {keys[len(keys) // 2]:,.0f}; "
        f"{profile.rows:,} rows of a text of {profile.tokens:,} tokens"
    )
