"""The table of `headrace profile --attention`."""

from collections.abc import Sequence
from statistics import mean

from headrace.measure.attention_profile import AttentionProfile, HeadAttention, by_layer
from headrace.measure.table import print_table

_LEGEND = """
Keys are the mean over rows and heads of the fewest keys with 90, 99 or 99.9 % of the weight; the
range is that of the heads. % 0: visible keys whose weight is exactly 0 in float32. % blocks 0: full
blocks of 32 keys that have no other weights. % by bounds: those that their bounds of keys show."""


def print_attention(profile: AttentionProfile) -> None:
    headings = [
        "layer",
        ">90 %",
        ">99 %",
        ">range",
        ">99.9 %",
        ">% 0",
        ">% blocks 0",
        ">% by bounds",
    ]
    rows = [_row(f"{layer:,}", heads) for layer, heads in by_layer(profile).items()]
    rows.append(_row("all", profile.heads))
    title = (
        f"{profile.name}, KV in {profile.kv_dtype}: keys of {profile.rows:,} rows with "
        f"{profile.context:,.0f} visible in the mean, of {profile.tokens:,} tokens"
    )
    print_table(headings, rows, title)
    print(_LEGEND)


def _row(label: str, heads: Sequence[HeadAttention]) -> list[str]:
    keys_90, keys_99, keys_999 = ([head.keys[i] for head in heads] for i in range(3))
    zeros = (
        [head.zero_keys for head in heads],
        [head.zero_blocks for head in heads],
        [head.bounded_blocks for head in heads],
    )
    return [
        label,
        f"{mean(keys_90):,.0f}",
        f"{mean(keys_99):,.0f}",
        f"{min(keys_99):,.0f}-{max(keys_99):,.0f}",
        f"{mean(keys_999):,.0f}",
        *(f"{100 * mean(shares):.2f}" for shares in zeros),
    ]
