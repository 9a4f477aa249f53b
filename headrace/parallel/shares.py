"""What each rank has: heads, rows of matrices, and the parts of values that follow from these."""

from headrace.errors import UnsupportedModelError
from headrace.program.collective import Columns

ROWS = 16
"""Rows of a matrix that stay together: a tile of the packed formats."""


def even(total: int, ranks: int, unit: int = 1) -> tuple[Columns, ...]:
    """Adjacent shares of `total` things as equal as units allow; a last unit may be short. Rank 0,
    which draws tokens as well, has none of the larger ones.
    """
    units = -(-total // unit)
    ends = [min(total, unit * (units * (rank + 1) // ranks)) for rank in range(ranks)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def times(parts: tuple[Columns, ...], size: int) -> tuple[Columns, ...]:
    """Shares of things that have so many columns each, in columns."""
    return tuple((first * size, last * size) for first, last in parts)


def kv_heads(num_kv_heads: int, ranks: int) -> tuple[Columns, ...]:
    """The KV heads of each rank: adjacent ones, or, where there are fewer than ranks, one that
    several ranks have.
    """
    if ranks <= num_kv_heads:
        return even(num_kv_heads, ranks)
    owners = [rank * num_kv_heads // ranks for rank in range(ranks)]
    return tuple((head, head + 1) for head in owners)


def query_heads(num_heads: int, num_kv_heads: int, ranks: int) -> tuple[Columns, ...]:
    """The heads of each rank, all of which read its KV heads. Raises UnsupportedModelError where
    there are fewer than ranks.
    """
    if num_heads < ranks:
        raise UnsupportedModelError(
            f"{ranks} ranks cannot share {num_heads} heads of attention: take {num_heads} at most"
        )
    group = num_heads // num_kv_heads
    kv = kv_heads(num_kv_heads, ranks)
    if ranks <= num_kv_heads:
        return times(kv, group)
    parts = []
    for rank, (head, _) in enumerate(kv):
        sharers = [other for other, (first, _) in enumerate(kv) if first == head]
        first, last = even(group, len(sharers))[sharers.index(rank)]
        parts.append((head * group + first, head * group + last))
    return tuple(parts)
